"""`hydra/launcher=process` and `=slurm`: what Hydra calls with the cells of `paxserve run -m`.

Owns: from Hydra's overrides to cells. In: lists of overrides. Out: an exit code, and nothing for
Hydra. Must not know: how cells run.

They lie here since Hydra looks for launchers in the namespace `hydra_plugins` only, where every
program that uses Hydra imports them: so they import the rest of paxserve when asked to launch.
"""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from paxserve.sweep.cell import Cell
    from paxserve.sweep.runner import Runner


class _SweepLauncher(Launcher):
    """Runs the cells that are missing, and the like (`resume`), by a runner of its own."""

    def __init__(self, resume: Any) -> None:
        self._resume = resume

    @abstractmethod
    def _runner(self) -> "Runner":
        """Who runs them.

        Raises:
            ValueError, ModuleNotFoundError: settings that are none, or a package that is missing.
        """

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """See `Launcher`."""
        self._loader, self._config = hydra_context.config_loader, config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """See `Launcher`. Ends the program with the sweep's exit code where that is not 0."""
        from paxserve.results import new_run_path
        from paxserve.sweep.run import sweep

        try:
            cells = [self._cell(overrides) for overrides in job_overrides]
            path = new_run_path(self._config.get("run_dir"))
            code = sweep(path, cells, resume=self._resume, runner=self._runner())
        except (ValueError, OSError, ModuleNotFoundError) as error:
            print(f"paxserve: error: {error}", file=sys.stderr)
            code = 2
        if code:
            raise SystemExit(code)
        return []

    def _cell(self, overrides: Sequence[str]) -> "Cell":
        from paxserve.hydra_config import key_of, plain_config
        from paxserve.sweep.cell import Cell

        config = self._loader.load_sweep_config(self._config, list(overrides))
        plain, choices, _ = plain_config(config)
        own = [override for override in overrides if not _is_of_the_sweep(key_of(override))]
        keys = [key_of(override).removeprefix("custom.").replace("__", ".") for override in own]
        return Cell(
            overrides=(*self._of_all_cells(), *own),
            keys=tuple(dict.fromkeys(keys)),
            config={"choices": choices, **plain},
        )

    def _of_all_cells(self) -> list[str]:
        """Where a user's own configs lie: `--config-dir`, `hydra.searchpath`."""
        hydra = self._config.hydra
        sources = hydra.runtime.config_sources
        own = [f"--config-dir={s.path}" for s in sources if s.provider == "command-line"]
        return own + [o for o in hydra.overrides.hydra if o.startswith("hydra.searchpath=")]


class ProcessLauncher(_SweepLauncher):
    """Its settings are those of configs/hydra/launcher/process.yaml."""

    def __init__(self, n_jobs: Any, resume: Any) -> None:
        super().__init__(resume)
        self._num_jobs = n_jobs

    def _runner(self) -> "Runner":
        from paxserve.sweep.processes import processes

        return processes(self._num_jobs)


class SlurmLauncher(_SweepLauncher):
    """Its settings are those of configs/hydra/launcher/slurm.yaml."""

    def __init__(self, cluster: Any, resume: Any, **resources: Any) -> None:
        super().__init__(resume)
        self._cluster, self._resources = cluster, resources

    def _runner(self) -> "Runner":
        from paxserve.sweep.slurm import array_of_jobs

        return array_of_jobs(self._cluster, self._resources)


def _is_of_the_sweep(key: str) -> bool:
    return key == "run_dir" or key.startswith("hydra.")
