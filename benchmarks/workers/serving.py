"""What the workers share, in whatever Python each runs: what they are given, and the turns."""

import json
import sys
import time

#: What the parent gives; each benchmark says what.
GIVEN = json.loads(sys.argv[1])


def serve(work, **answers):
    """Says `ready`, then works once for each line `turn` and answers with the seconds it took.

    Another line is a question, answered by the function of `answers` that has its name.
    """
    print("ready", flush=True)
    for line in sys.stdin:
        question = line.strip()
        if question in answers:
            print(answers[question](), flush=True)
            continue
        started = time.perf_counter()
        result = work()
        print(time.perf_counter() - started, flush=True)
        del result
