"""Recorded streams of a controller's events, which every build must answer equally.

    python -m tests.simulation.streams record FILE [--seeds 0..20] [--kinds takeovers ...] [--build SRC]
    python -m tests.simulation.streams replay FILE [--build SRC]

A stream is what reached the controller in one simulated run with faults: connections and their ends, requests as they
are on the wire, state files, restarts, and the virtual time of each. It contains no record, effect or name of a module.
`record` writes the streams, and what the recording build answers. `replay` gives the same streams to another build, and
compares the reply to each request with its time, the orders to storage units, and the state (`to_comparable`) at every
100th event, at each restart and at the end. Records may differ.

Both run a stream with `controller_driver`, the only module here that knows the interface of the core. `--build` names
the folder that contains the package, such as `src` of another checkout. The tool itself is that of the other checkout
if it has one, and otherwise this one.

What could differ without a change of behavior is removed as follows:

- Jobs in slices, effects in parts, and work beside the loop (deals, state files): the driver completes all of it before
  the next event, at the same virtual time. A build may slice work in another way, and a sliced job never meets a
  request in a replay. The simulations themselves run such meetings.
- Ticks: the driver ticks a controller exactly at the deadlines that the controller names itself, except while it was
  stopped or dead in the recorded run. An event "tick" only says that time has passed.
- Order: replies are compared per request, so the order between different requests is free. Orders to units are compared
  as a set with counts. Extents to free count one by one, however they are grouped.
- Versions: the first recorded build wrote a put in up to three records, each with a version of the partition. The
  driver counts these versions, too.
- Random numbers: identifiers of clients and arenas are in the recorded messages. The controller draws none; the driver
  numbers its boots.
- Events that a controller lost: if it was killed before an event was in the journal, or a later term had begun, the
  stream does not contain this event and its successors. A restart continues with the journal, in a stream as in a run.
- Clocks of different nodes: a stream has one clock, the virtual one.

The recorder lets the simulated controller complete its jobs at the same moments. So the driver's run is nearly always
the recorded one (in 93 of 100 streams it ended in the same state). In the others a recorded request comes too early or
too late for the driver's controller. That is as good a test: its reply is another one, and the same for every build.
"""
