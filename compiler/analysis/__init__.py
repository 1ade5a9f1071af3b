"""Facts about a program: functions of a Program that return facts, never a Program."""
