"""What the choice of engines costs a request as the fleet grows, without engines and sockets.

    python -m benchmarks.decisions [--rounds N]

Fleets of half prefill and half decode engines with one rank each, all of which have reported their
load. A decision is the view of the fleet and the choice; the chosen engines' loads change after it,
as by a request. `decision_us_N`: the median of rounds, in a fleet of N engines.
`decision_per_engine_us`: what each further engine costs.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.common import emit, progress
from kvconnect.router import flags
from kvconnect.router.fleet.engines import Engine, Fleet
from kvconnect.router.policy.choice import FailedTargets, RoutedRequest, choose
from kvconnect.router.policy.fleet_view import Role
from kvconnect.router.requests.engine_bodies import EngineTicket, TicketKind

FLEETS = (2, 16, 64)
ROUNDS = 31
DECISIONS = 100  # of a round
TOKENS = 300  # of a prompt


class _Nobody:
    """Is told of a fleet's changes."""

    def up(self, engine: Engine) -> None:
        pass

    def add_engine(self, role: Role, url: str) -> None:
        pass

    def remove_engine(self, role: Role, url: str) -> None:
        pass


def decision_us(engines: int, rounds: int) -> float:
    """Return the microseconds of a decision in a fleet."""
    urls = [f"http://127.0.0.1:{port}" for port in range(1, engines + 1)]
    half = engines // 2
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    given = ["--prefill", *urls[:half], "--decode", *urls[half:]]
    options = flags.options_of(parser.parse_args(given))
    fleet, now = Fleet(options, _Nobody()), time.monotonic()
    for engine in fleet.all():
        engine.mark(up=True)
        engine.info.models, engine.info.version = {"model": {}}, "1"
        engine.hold_ticket(TicketKind.STANDING, 0, EngineTicket("ticket", 600.0), now)
        engine.loads.report(engine.loads.ask(now), {0: 0.0})

    def decide(turn: int) -> None:
        view = fleet.view(timed=False)  # as a decision that does not depend on times asks for it
        request = RoutedRequest(turn, TOKENS, "model")
        found = choose(view, request, FailedTargets(), options.rules)
        assert found is not None and found.prefill is not None, "all engines are up"
        for role, chosen in ((Role.PREFILL, found.prefill), (Role.DECODE, found.decode)):
            engine = fleet.get(role, chosen.target.engine)
            engine.began(chosen, now)
            engine.ended(chosen, computed=False)

    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        for turn in range(DECISIONS):
            decide(number * DECISIONS + turn)
        seconds.append((time.perf_counter() - began) / DECISIONS)
    return 1e6 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    figures = {}
    for engines in FLEETS:
        figures[f"decision_us_{engines}"] = found = decision_us(engines, rounds)
        progress(f"{engines} engines: {found:.1f} us")
    few, many = FLEETS[0], FLEETS[-1]
    more = figures[f"decision_us_{many}"] - figures[f"decision_us_{few}"]
    figures["decision_per_engine_us"] = more / (many - few)
    emit("decisions", figures)


if __name__ == "__main__":
    main()
