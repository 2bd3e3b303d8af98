"""How long requests take: histograms in Prometheus' text format, and the same as a small table."""

import bisect
import math

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """Counts of values by upper bound (inclusive); the last bucket has none."""

    def __init__(self, name: str, help: str, bounds: tuple[float, ...] = _SECONDS):
        self.name, self.help, self.bounds = name, help, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def prometheus(self) -> str:
        lines = [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} histogram"]
        running = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            running += count
            lines.append(f'{self.name}_bucket{{le="{"+Inf" if bound == math.inf else f"{bound:g}"}"}} {running}')
        return "\n".join([*lines, f"{self.name}_sum {self.total:.6f}", f"{self.name}_count {running}", ""])

    def table(self) -> str:
        """One line a bucket that holds something: bound, count, share, bar."""
        n = sum(self.counts)
        lines = [f"{self.help}: {n}" + (f", mean {self.total / n:.4g}" if n else "")]
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            if count:
                lines.append(f"  <= {bound:<6g} {count:>8} {count / n:>6.1%} {'#' * math.ceil(30 * count / n)}")
        return "\n".join(lines)


class Metrics:
    """Of one server. `requests` counts by outcome: answered, refused (the message's fault), failed (the policy's)."""

    def __init__(self):
        self.request = Histogram("somaspeed_request_seconds", "seconds from a message's arrival to its answer")
        self.policy = Histogram("somaspeed_policy_seconds", "seconds the policy took for a batch")
        self.batch = Histogram("somaspeed_batch_size", "observations in a batch", (1, 2, 4, 8, 16, 32, 64))
        self.requests = {"answered": 0, "refused": 0, "failed": 0}
        self.clients = 0

    def prometheus(self) -> str:
        text = "".join(h.prometheus() for h in (self.request, self.policy, self.batch))
        text += "# HELP somaspeed_requests_total messages by outcome\n# TYPE somaspeed_requests_total counter\n"
        text += "".join(f'somaspeed_requests_total{{outcome="{k}"}} {n}\n' for k, n in self.requests.items())
        text += "# HELP somaspeed_clients connected now\n# TYPE somaspeed_clients gauge\n"
        return f"{text}somaspeed_clients {self.clients}\n"

    def table(self) -> str:
        outcomes = ", ".join(f"{n} {outcome}" for outcome, n in self.requests.items())
        return "\n".join([outcomes, self.request.table(), self.policy.table(), self.batch.table()])
