"""Medians and ratios of what was measured in rounds."""
import dataclasses
import math
import statistics


def quantile(values: list, q: float) -> float:
    """The value below which a share `q` of `values` lies (nearest rank): as in bench/timings.cpp."""
    return sorted(values)[math.floor(q * (len(values) - 1) + 0.5)]


def slowest(by_rank: list) -> list:
    """Element by element the largest of all ranks' values: what all do together takes as long as the slowest one's."""
    return [max(values) for values in zip(*by_rank, strict=True)]


def allreduce_result(bytes: int, time_us: float, world_size: int, **more) -> dict:
    """As `lockstep bench allreduce --json` prints it: bandwidths in 10⁹ bytes/s, as nccl-tests define them."""
    algbw = bytes / max(time_us, 1e-3) * 1e-3
    return {"bytes": bytes, "time_us": time_us, "algbw_gbs": algbw,
            "busbw_gbs": algbw * 2 * (world_size - 1) / world_size, "world_size": world_size, **more}


@dataclasses.dataclass(frozen=True)
class Spread:
    """What one figure came to over all rounds."""
    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values))


def ratio(numerators: dict, denominators: dict):
    """Round by round, over the rounds (keys) that both have: both saw the same machine. None if there are none."""
    ratios = [numerators[r] / denominators[r] for r in numerators if denominators.get(r)]
    return Spread.of(ratios) if ratios else None
