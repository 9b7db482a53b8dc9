"""Checks of numbers at the door: settings of workloads, and fields of trace files.

Owns: what counts as a whole or a real number, and how a wrong one is reported. In: a name (of a
setting, or of a place in a file) and a value. Out: the value. Must not know: what it is for.
"""

import math

MOST_TOKENS = 10**7
MOST_REQUESTS = 10**7
MOST_S = 10.0**9


def whole(name: str, value: object, *, low: int = 0, high: int) -> int:
    """An integer in [low, high]; true and false are not numbers.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {shown(value)}")
    return value


def real(name: str, value: object, *, low: float = 0.0, high: float, above: bool = False) -> float:
    """A finite number in [low, high], or in (low, high] with `above`.

    Raises:
        ValueError: it is not.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (above and value == low):  # type: ignore[operator]
        least = f"above {low:g}" if above else f"from {low:g}"
        raise ValueError(f"{name} must be a number {least} to {high:g}, got {shown(value)}")
    return float(value)  # type: ignore[arg-type]


def flag(name: str, value: object) -> None:
    """True or false.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {shown(value)}")


def whole_text(name: str, text: str, *, low: int = 0, high: int) -> int:
    """An integer written as text; `7564.0` is one.

    Raises:
        ValueError: it is not.
    """
    value = _number(text)
    is_one = low <= value <= high and value == int(value)
    return whole(name, int(value) if is_one else text, low=low, high=high)


def real_text(name: str, text: str, *, low: float = 0.0, high: float) -> float:
    """A finite number written as text.

    Raises:
        ValueError: it is not.
    """
    value = _number(text)
    return real(name, value if low <= value <= high else text, low=low, high=high)


def shown(value: object) -> str:
    """A value in a message, however long it is."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _number(text: str) -> float:
    """NaN, which lies in no range, for what is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
