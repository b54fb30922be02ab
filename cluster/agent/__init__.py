"""What runs on the nodes of a run: standard library of Python 3.9 only. On this machine the same modules are imported.

start.start(spec) -> dict, start.run_foreground(spec) -> int            the supervisor begins
folder.read_status(folder, node), .beat, .request_stop, .request_stacks  the files by which it is controlled
start.sweep(folder, node, run_id) -> [pids]                              what is left of a run goes
serve.main                                                               all of that over one SSH exec
code.install, survey.survey                                              before it: what the node has and lacks
"""
