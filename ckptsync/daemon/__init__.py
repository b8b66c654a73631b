"""The roles under APScheduler and watchdog: ``schedule``, signals and sd_notify."""
