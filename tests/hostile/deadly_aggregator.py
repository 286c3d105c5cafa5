"""An aggregator in whose reading some bytes are deadly: it is started again each time it dies by them.

Run as a program, configured by the environment like `deltapost aggregator`. Each start is a process of its
own, which SIGKILLs itself when it decodes a message or a payload that begins with DEADLY. SIGTERM ends the
present one in order; then the number of deaths is printed.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import deltapost_aggregator.intake as intake
import deltapost_aggregator.payloads as payloads
from deltapost_aggregator.service import AggregatorService, open_services
from deltapost_aggregator.settings import AggregatorSettings

DEADLY = b"deadly"


def _deadly(decode: Any) -> Any:
    def decoding(data: Any, *arguments: Any) -> Any:
        if bytes(data[: len(DEADLY)]) == DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return decode(data, *arguments)

    return decoding


def _serve() -> None:
    intake.read_message = _deadly(intake.read_message)
    payloads.check_payload = _deadly(payloads.check_payload)
    service = AggregatorService(open_services(AggregatorSettings.read()))
    signal.signal(signal.SIGTERM, lambda _signal, _frame: service.stop())
    service.run()


def main() -> None:
    deaths = 0
    while True:
        child = os.fork()
        if child == 0:
            _serve()
            os._exit(0)
        signal.signal(signal.SIGTERM, lambda _signal, _frame, child=child: os.kill(child, signal.SIGTERM))
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print(deaths, os.waitstatus_to_exitcode(status), flush=True)
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        deaths += 1


if __name__ == "__main__":
    main()
