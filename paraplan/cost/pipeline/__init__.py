"""Pipeline stages, schedules and their bubbles."""
