"""A check: what it looks at, why that matters, the cure, and the function that judges."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from tutti.machine.checks.finding import Finding, Skip, Verdict
from tutti.machine.checks.patient import Patient
from tutti.machine.observation import Machine

Judge = Callable[[Patient, int], Iterable[Verdict]]


@dataclass(frozen=True)
class Check:
    """One line of docs/doctor.md. No verdict from its judge means that all is well."""

    id: str
    about: str
    why: str
    cure: str
    judge: Judge
    over: Literal["host", "world"] = "host"
    """Whether it judges each host by itself, or all of them together."""

    def findings(self, patient: Patient) -> Iterator[Finding]:
        """Judge. Whatever a check trips over is told as a skip: it must never end the doctor."""
        hosts = range(len(patient.machines)) if self.over == "host" else (0,)
        for host in hosts:
            name = patient.machines[host].host if self.over == "host" else ""
            try:
                verdicts = list(self.judge(patient, host))
            except Skip as skip:
                verdicts = [Verdict("skip", self._scope, str(skip))]
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                verdicts = [Verdict("skip", self._scope, f"the check itself failed: {said}")]
            for verdict in verdicts or [Verdict("pass", self._scope, "nothing found")]:
                yield self._finding(verdict, name)

    @property
    def _scope(self) -> str:
        return "machine" if self.over == "host" else "world"

    def _finding(self, verdict: Verdict, host: str) -> Finding:
        told = verdict.status in ("warn", "fail")
        return Finding(
            self.id,
            verdict.host or host,
            verdict.scope,
            verdict.status,
            verdict.observed,
            verdict.expected,
            verdict.cure or (self.cure if told else ""),
            verdict.commands,
        )


def on_machine(judge: Callable[[Machine], Iterable[Verdict]]) -> Judge:
    """A judge that needs no more than the machine."""
    return lambda patient, host: judge(patient.machines[host])


def on_world(judge: Callable[[Patient], Iterable[Verdict]]) -> Judge:
    """A judge of all hosts and ranks together."""
    return lambda patient, host: judge(patient)
