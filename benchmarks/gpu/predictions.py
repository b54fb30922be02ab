"""Memory policies and peaks of the planned steps, found on the CPU as `burst plan` does while the device measures."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from benchmarks.gpu.plan import Measurement, Row
from benchmarks.gpu.runner import Budget
from benchmarks.gpu.steps import ALONE, Policy, choose_policy, config_of, read_config, resolved
from benchmarks.gpu.worker import MeasurementError, error_text
from engine.predict.memory import MemoryPrediction, Predictor
from engine.resolve.legality import method_on

LEAST_S = 5.0


class Predictions:
    """Starts the choice of a policy for every whole model, and a prediction for every measurement that asks for one.

    None outlives the budget by more than seconds.
    """

    def __init__(self, measurements: Sequence[Measurement], device_name: str, budget: Budget) -> None:
        self._device_name, self._budget = device_name, budget
        self._pool = ThreadPoolExecutor(1)  # one process answers all
        self._predictor = Predictor(timeout_s=max(LEAST_S, budget.left_s))
        wholes = dict.fromkeys(m.settings["config"] for m in measurements)
        self._policies = {whole: self._pool.submit(self._choose, whole) for whole in wholes}
        self._futures: dict[str, Future[MemoryPrediction]] = {
            m.label: self._pool.submit(self._predict, m) for m in measurements if m.settings["about"]["predicts"]
        }

    def ready(self, measurement: Measurement) -> Measurement:
        """A step with the policy of its whole model, as soon as it is known; others as they are.

        Raises MeasurementError when there is none within the budget.
        """
        policy = self._policies.get(measurement.settings.get("config"))
        if policy is None:
            return measurement
        try:
            return resolved(measurement, policy.result(timeout=max(LEAST_S, self._budget.left_s)))
        except Exception as error:
            raise MeasurementError(f"no memory policy: {error_text(error)}") from error

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

    def _choose(self, whole: str) -> Policy:
        return choose_policy(read_config(whole), self._device_name, self._predictor.predict)

    def _predict(self, measurement: Measurement) -> MemoryPrediction:
        policy = self._policies[measurement.settings["config"]].result()  # chosen before, by the same thread
        config = config_of(resolved(measurement, policy))
        return self._predictor.predict(config, method_on(config, ALONE), ALONE)

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
