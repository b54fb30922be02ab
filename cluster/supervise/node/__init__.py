"""What runs on the nodes of a run: standard library of Python 3.9 only. On this machine the same modules are imported.

daemon.start(spec) -> dict, daemon.run_foreground(spec) -> int          the supervisor begins
folder.read_status(folder, node), .beat, .request_stop, .request_stacks  the files by which it is controlled
sweep.sweep(folder, node, run_id) -> [pids]                              what is left of a run goes
agent.main                                                               all of that over one SSH exec
"""
