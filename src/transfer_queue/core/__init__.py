"""The controller's state machine: pure, event-sourced, without sockets, clocks, threads, torch or logging."""
