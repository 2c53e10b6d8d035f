# SPDX-License-Identifier: Apache-2.0
"""Three ways to time the contestants of a benchmark case. All of them take turns, so that a busy
machine or a warm card slows all of them alike.

bursts
    One call at a time, each after a pause. A GPU has the clock of a cool card then. The time is the
    device's, between events; launching is not part of it.
sustained
    One contestant keeps the device busy for half a second, then the next one. A GPU runs at its
    power limit then, as it does in training, and at the clock that this limit leaves to the
    contestant. The time is the device's again.
eager
    What a loop over small calls sees: the wall time of many calls with one synchronisation at the
    end, divided by their number. The host's work is part of it, and mostly all of it.

A contestant has ``forward()``, which gives a result with a graph, ``backward(out)``, a ``context``
to call them in, and a list of seconds per direction in ``times``, one entry per round.
"""

import statistics
import time

import torch

DIRECTIONS = ("forward", "backward", "both")

#: Seconds that a contestant keeps the device busy in one direction and round.
BUSY_SECONDS = 0.5
#: Of these, the part that goes by before the clock has settled.
SETTLING = 1 / 3
#: Calls that may wait on the device. It never idles between them, and the host, which looks at the
#: time, is never far ahead.
QUEUED = 4
#: Calls behind one another in an eager round.
EAGER_CALLS = 100


def turns(contestants, round_):
    """The order within a round: each starts one contestant later than the one before."""
    at = round_ % len(contestants)
    return contestants[at:] + contestants[:at]


# --- bursts ---------------------------------------------------------------------------------------


class _HostClock:
    def __init__(self):
        self.marks = [time.perf_counter()]

    def mark(self):
        self.marks.append(time.perf_counter())

    def laps(self):
        return [b - a for a, b in zip(self.marks, self.marks[1:])]


class _DeviceClock:
    """Time on the device, between events. The device first idles until the host has queued the
    work: in training the host runs ahead of the device too."""

    _CYCLES = 2_000_000  # about a millisecond

    def __init__(self, head_start):
        self.events = []
        torch.cuda._sleep(head_start * self._CYCLES)
        self.mark()

    def mark(self):
        self.events.append(torch.cuda.Event(enable_timing=True))
        self.events[-1].record()

    def laps(self):
        self.events[-1].synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(self.events, self.events[1:])]


def _step(contestant, device, head_start):
    """Seconds of a forward and of a backward."""
    clock = _DeviceClock(head_start) if device == "cuda" else _HostClock()
    out = contestant.forward()
    clock.mark()
    contestant.backward(out)
    clock.mark()
    return clock.laps()


def bursts(contestants, device, rounds, head_start=1):
    """head_start: milliseconds that the device gives the host to queue a call."""
    for c in contestants:
        for _ in range(3 if device == "cuda" else 1):  # clocks, plans and caches warm up
            with c.context():
                _step(c, device, head_start)
    for r in range(rounds):
        for c in turns(contestants, r):
            with c.context():
                forward, backward = _step(c, device, head_start)
            for direction, t in zip(DIRECTIONS, (forward, backward, forward + backward)):
                c.times[direction].append(t)


# --- sustained ------------------------------------------------------------------------------------


def _busy_laps(call, device):
    """Seconds of each call, of calls behind one another."""
    start = time.perf_counter()
    if device != "cuda":
        clock = _HostClock()
        while time.perf_counter() - start < BUSY_SECONDS or len(clock.marks) < 3:
            call()
            clock.mark()
        return clock.laps()
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    while time.perf_counter() - start < BUSY_SECONDS or len(events) < 4:
        call()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        if len(events) > QUEUED:
            events[-QUEUED].synchronize()
    events[-1].synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]


def _calls(contestant, direction):
    """What to call over and over for one direction."""
    if direction == "forward":
        return contestant.forward
    if direction == "both":
        return lambda: contestant.backward(contestant.forward())
    out = contestant.forward()
    return lambda: contestant.backward(out, retain_graph=True)


def sustained(contestants, device, rounds):
    for direction in DIRECTIONS:
        for r in range(rounds):
            for c in turns(contestants, r):
                with c.context():
                    laps = _busy_laps(_calls(c, direction), device)
                settled = laps[int(len(laps) * SETTLING) :]
                c.times[direction].append(statistics.median(settled))


# --- eager ----------------------------------------------------------------------------------------


def _wall(call, device):
    """Seconds per call."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    for _ in range(EAGER_CALLS):
        call()
    wait()
    return (time.perf_counter() - start) / EAGER_CALLS


def eager(contestants, device, rounds):
    """A forward without a graph, as in evaluation, and a forward with its backward."""
    for direction in ("forward", "both"):
        for r in range(-1, rounds):  # the first round warms up
            for c in turns(contestants, max(r, 0)):
                with c.context(), torch.set_grad_enabled(direction == "both"):
                    seconds = _wall(_calls(c, direction), device)
                if r >= 0:
                    c.times[direction].append(seconds)


#: Name: (function, rounds unless told).
WAYS = {"bursts": (bursts, 7), "sustained": (sustained, 2), "eager": (eager, 7)}
