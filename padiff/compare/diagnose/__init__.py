"""Why two runs part: the likely cause of the first diff, in words."""
