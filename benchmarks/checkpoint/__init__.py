"""What a checkpoint costs: how long training stands still for one."""
