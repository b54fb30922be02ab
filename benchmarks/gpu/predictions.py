"""Peaks of the planned steps, predicted on the CPU as `burst plan` does while the device measures other things."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from benchmarks.gpu.plan import Measurement, Row
from benchmarks.gpu.runner import Budget
from benchmarks.gpu.steps import ALONE, read_config
from engine.planning.memory.predictor import MemoryPrediction, Predictor

LEAST_S = 5.0


class Predictions:
    """Starts a prediction for every measurement that asks for one; none outlives the budget by more than seconds."""

    def __init__(self, measurements: Sequence[Measurement], budget: Budget) -> None:
        self._budget = budget
        self._pool = ThreadPoolExecutor(1)  # one process answers all
        self._predictor = Predictor(timeout_s=max(LEAST_S, budget.left_s))
        self._futures: dict[str, Future[MemoryPrediction]] = {
            m.label: self._pool.submit(self._predict, m) for m in measurements if m.settings["about"]["predicts"]
        }

    def amend(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with what has been predicted by now, and measured over predicted."""
        return [self._amend(row) for row in rows]

    def wait(self, rows: Sequence[Row]) -> None:
        """Until the predictions of these rows are there, or the budget is used up."""
        wanted = [self._futures[row["label"]] for row in rows if row["label"] in self._futures]
        wait(wanted, timeout=max(LEAST_S, self._budget.left_s))

    def close(self) -> None:
        """Start no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._predictor.close()

    def _predict(self, measurement: Measurement) -> MemoryPrediction:
        config = read_config(measurement.settings["config"])
        return self._predictor.predict(config, ALONE)

    def _amend(self, row: Row) -> Row:
        future = self._futures.get(row["label"])
        if row["status"] != "measured" or future is None or not future.done() or future.cancelled():
            return row
        error = future.exception()
        if error is not None:
            return row | {"prediction_error": " ".join(str(error).split())}
        found = future.result()
        return row | {
            "predicted_bytes": found.device_peak_bytes,
            "predicted_needed_bytes": found.needed_bytes,
            "predicted_host_bytes": found.host_peak_bytes,
            "predicted_phase": found.phase,
            "predicted_components": found.components["device"],
            "prediction_s": found.seconds,
            "measured_over_predicted": row["peak_bytes"] / found.device_peak_bytes,
        }
