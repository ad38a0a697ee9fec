"""The words everyone speaks."""
