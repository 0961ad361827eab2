"""How much of a queue pair may be in flight: NSCC, or a fixed window.

NSCC keeps one window in bytes for all paths. It looks at the queueing delay (round trip minus base round trip) of
each acknowledged packet and at whether that packet was marked:

    no mark, delay below target     increase in proportion to what is missing to the target; a delay near zero for a
                                    whole window: increase fast
    no mark, delay above            fair increase
    mark, delay above               multiplicative decrease, once per base round trip
    mark, delay below               nothing: the path will be skipped, that is enough

A trim or an inferred loss takes its packet's size off; once per period, if little got through, the window becomes
what did get through (quick adapt), and of what is then in flight, marks are ignored, and trims and losses, too.

Use: ``window = Nscc(NsccSettings(base_rtt_ns=20_000, line_rate_bps=2 * 10**11))``; ``window.bytes``;
``window.on_ack(...)``, ``window.on_trim(...)``, ``window.on_loss(...)``.
Time: nanoseconds, passed in. Limits: one controller per queue pair, where the specification lets several share one.
Source: UET 1.0 section 3.6.13 and Table 3-82, which MRC takes over, through their readers. Ours: that trims and
losses are ignored as marks are after a quick adapt (the readers speak of marks only), the weight of the average
delay, what counts as a delay near zero, and the least that the largest window is.
"""

from __future__ import annotations

from dataclasses import dataclass

REFERENCE_BDP_BYTES = 150_000
REFERENCE_DELAY_NS = 12_000
GAMMA = 0.8
MD_JUMP_MAX = 0.5
QA_GATE = 3
QA_DELAY_TARGETS = 4
NEAR_ZERO_NS = 1_000
AVERAGE_WEIGHT = 1 / 16


class Window:
    """A fixed window, which is no congestion control, and the interface of one: what a requestor tells and asks."""

    def __init__(self, window_bytes: int) -> None:
        self.bytes: float = window_bytes
        """In flight at most."""

    def on_ack(self, now_ns: int, newly_bytes: int, rtt_ns: int | None, marked: bool, inflight_bytes: int) -> None:
        """``newly_bytes`` were acknowledged, by a packet with this round trip (None: not known) and mark."""

    def on_trim(self, now_ns: int, size_bytes: int, inflight_bytes: int) -> None:
        """A packet was cut."""

    def on_loss(self, now_ns: int, size_bytes: int, inflight_bytes: int) -> None:
        """A packet was lost."""

    def on_receiver(self, penalty: int, restore: bool, newly_bytes: int) -> None:
        """The receiver's own wish, from CC_STATE: a penalty of 0 to 127, or the window of before it back."""


@dataclass(frozen=True, slots=True)
class NsccSettings:
    """base_rtt_ns: round trip with empty queues. line_rate_bps: of all ports together. mtu_bytes: a full frame.

    trimming: whether the fabric cuts packets; without it the delay target is larger and a long delay is like a loss.
    """

    base_rtt_ns: int
    line_rate_bps: int
    mtu_bytes: int = 4242
    trimming: bool = True

    @property
    def bdp_bytes(self) -> float:
        """What fills the path."""
        return self.line_rate_bps * self.base_rtt_ns / 8e9

    @property
    def target_ns(self) -> float:
        """The queueing delay aimed at."""
        return self.base_rtt_ns * (0.75 if self.trimming else 1.0)


class Nscc(Window):
    """``bytes`` is the window; ``decreases`` and ``quick_adapts`` count."""

    def __init__(self, settings: NsccSettings) -> None:
        mtu, target_ns = settings.mtu_bytes, settings.target_ns
        scale, delay_scale = settings.bdp_bytes / REFERENCE_BDP_BYTES, target_ns / REFERENCE_DELAY_NS
        self.settings = settings
        self.max_bytes = max(1.5 * settings.bdp_bytes, 2 * mtu)
        self.bytes = self.max_bytes
        self.decreases = self.quick_adapts = 0
        self._target_ns = target_ns
        self._fair = 5 * mtu * scale
        self._fast_scale = 0.25 * scale
        self._eta = 0.15 * mtu * scale
        self._alpha = 4 * scale * delay_scale * mtu / target_ns
        self._adjust_bytes = 8 * mtu
        self._increase = 0.0  # bytes squared, divided by the window when applied
        self._since_adjust_bytes = 0
        self._adjusted_ns = 0
        self._average_ns = 0.0
        self._decreased_ns = -settings.base_rtt_ns
        self._fast_bytes = 0
        self._achieved_bytes = 0
        self._period_ends_ns = 0
        self._adapt = False
        self._ignore_bytes = 0
        self._saved_bytes: float | None = None

    def on_ack(self, now_ns: int, newly_bytes: int, rtt_ns: int | None, marked: bool, inflight_bytes: int) -> None:
        """See Window."""
        self._achieved_bytes += newly_bytes
        if rtt_ns is not None:
            delay_ns = max(0, rtt_ns - self.settings.base_rtt_ns)
            self._average_ns += AVERAGE_WEIGHT * (delay_ns - self._average_ns)
            if not self.settings.trimming and delay_ns > QA_DELAY_TARGETS * self._target_ns:
                self._adapt = True
            if self._quick_adapt(now_ns, inflight_bytes):
                return
            self._react(now_ns, newly_bytes, delay_ns, marked)
        self._since_adjust_bytes += newly_bytes
        late = now_ns - self._adjusted_ns >= self.settings.base_rtt_ns
        if late or self._since_adjust_bytes >= self._adjust_bytes:
            self.bytes += self._increase / self.bytes + (self._eta if late else 0)
            self._increase, self._since_adjust_bytes = 0.0, 0
            self._adjusted_ns = now_ns if late else self._adjusted_ns
        self._bound()

    def _react(self, now_ns: int, newly_bytes: int, delay_ns: int, marked: bool) -> None:
        if marked and self._ignore_bytes > 0:
            self._ignore_bytes -= newly_bytes
            return
        self._fast_bytes = self._fast_bytes + newly_bytes if delay_ns < NEAR_ZERO_NS and not marked else 0
        if self._fast_bytes > self.bytes:
            self.bytes += newly_bytes * self._fast_scale
        elif marked:
            if delay_ns >= self._target_ns:
                self._decrease(now_ns)
        elif delay_ns < self._target_ns:
            self._increase += self._alpha * newly_bytes * (self._target_ns - delay_ns)
        else:
            self._increase += self._fair * newly_bytes

    def _decrease(self, now_ns: int) -> None:
        if now_ns - self._decreased_ns < self.settings.base_rtt_ns or self._average_ns <= self._target_ns:
            return
        self._decreased_ns = now_ns
        self.decreases += 1
        self.bytes *= max(1 - GAMMA * (self._average_ns - self._target_ns) / self._average_ns, MD_JUMP_MAX)

    def _quick_adapt(self, now_ns: int, inflight_bytes: int) -> bool:
        if now_ns < self._period_ends_ns:
            return False
        achieved = self._achieved_bytes
        due = self._adapt and self._period_ends_ns > 0 and achieved < self.max_bytes / (1 << QA_GATE)
        if due:
            self.quick_adapts += 1
            self.bytes = achieved
            self._ignore_bytes = inflight_bytes
            self._increase = 0.0
            self._bound()
        self._adapt = False
        self._achieved_bytes = 0
        self._period_ends_ns = now_ns + self.settings.base_rtt_ns + int(self._target_ns)
        return due

    def on_trim(self, now_ns: int, size_bytes: int, inflight_bytes: int) -> None:
        """See Window. After a quick adapt it ignores what marks are ignored for: our choice, not a reader's rule."""
        self._fast_bytes = 0
        if self._ignore_bytes > 0:
            self._ignore_bytes -= size_bytes
            return
        self._adapt = True
        if not self._quick_adapt(now_ns, inflight_bytes):
            self.bytes -= size_bytes
            self._bound()

    def on_loss(self, now_ns: int, size_bytes: int, inflight_bytes: int) -> None:
        """See Window: the same as a trim."""
        self.on_trim(now_ns, size_bytes, inflight_bytes)

    def on_receiver(self, penalty: int, restore: bool, newly_bytes: int) -> None:
        """See Window."""
        if penalty:
            self._saved_bytes = self._saved_bytes or self.bytes
            self.bytes -= penalty * newly_bytes >> 7
        elif restore and self._saved_bytes is not None:
            self.bytes, self._saved_bytes = max(self.bytes, self._saved_bytes), None
        self._bound()

    def _bound(self) -> None:
        self.bytes = min(max(self.bytes, self.settings.mtu_bytes), self.max_bytes)
