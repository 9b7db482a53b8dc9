"""`hydra/launcher=process` and `=slurm`: what Hydra calls with the cells of `paxserve run -m`.

Owns: from Hydra's overrides to cells. In: lists of overrides. Out: an exit code, and nothing for
Hydra. Must not know: how cells run.

They lie here since Hydra looks for launchers in the namespace `hydra_plugins` only, where every
program that uses Hydra imports them: so they import the rest of paxserve when asked to launch.
"""

import sys
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from paxserve.sweep.cell import Cell
    from paxserve.sweep.runner import Runner


class _Composed:
    """Hydra's loader of configs, which remembers the cells that it has composed.

    Hydra composes every cell to see whether it is legal, and leaves it to the launcher to do that
    again; it takes a tenth of a second.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        from paxserve.terminal import Terminal

        self._loader, self._terminal = loader, Terminal()
        self._cells: dict[tuple[str, ...], Cell] = {}
        self._error: ValueError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """See `ConfigLoader`."""
        config = self._loader.load_sweep_config(master_config, sweep_overrides)
        try:
            cell = _cell_of(config, master_config, sweep_overrides)
            self._cells[tuple(sweep_overrides)] = cell
        except ValueError as error:  # Hydra would show it with all that led there
            self._error = self._error or error
        self._terminal.progress("composing cells", len(self._cells), len(self._cells) + 1)
        return config

    def cells(self, batch: Sequence[Sequence[str]]) -> "list[Cell]":
        """The cells, which Hydra has found to be legal.

        Raises:
            ValueError: one has no value for something that must have one.
        """
        self._terminal.close()
        if self._error is not None:
            raise self._error
        return [self._cells[tuple(overrides)] for overrides in batch]


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
        self._composed = _Composed(hydra_context.config_loader)
        hydra_context.config_loader = cast(ConfigLoader, self._composed)
        self._wanted = config.get("run_dir")
        self._batch_size = config.hydra.sweeper.get("max_batch_size")

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """See `Launcher`. Ends the program with the sweep's exit code where that is not 0."""
        from paxserve.results import new_run_path
        from paxserve.sweep.run import sweep

        try:
            if self._batch_size is not None:
                raise ValueError(
                    f"hydra.sweeper.max_batch_size={self._batch_size}: a sweep takes all its cells "
                    "at once: leave it null, and say with n_jobs how many run at a time"
                )
            cells = self._composed.cells(job_overrides)
            path = new_run_path(self._wanted)
            code = sweep(path, cells, resume=self._resume, runner=self._runner())
        except (ValueError, OSError, ModuleNotFoundError) as error:
            print(f"paxserve: error: {error}", file=sys.stderr)
            code = 2
        if code:
            raise SystemExit(code)
        return []


def _cell_of(config: DictConfig, master_config: DictConfig, overrides: Sequence[str]) -> "Cell":
    from paxserve.hydra_config import key_of, plain_config
    from paxserve.sweep.cell import Cell

    plain, choices, _ = plain_config(config)
    own = [override for override in overrides if not _is_of_the_sweep(key_of(override))]
    keys = [key_of(override).removeprefix("custom.").replace("__", ".") for override in own]
    return Cell(
        overrides=(*_of_all_cells(master_config.hydra), *own),
        keys=tuple(dict.fromkeys(keys)),
        config={"choices": choices, **plain},
    )


def _of_all_cells(hydra: Any) -> list[str]:
    """Where a user's own configs lie: `--config-dir`, `hydra.searchpath`."""
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
