"""The built-in tasks, written as any user would write them: plain scripts around `paceline.prepare`."""

TASKS = ("text", "fashion", "digits")
