"""Published schedules of distributed attention, one file each: what one rank does, in the order in which it acts."""
