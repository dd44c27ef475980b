"""A seeded world in virtual time around the real `policy/` code: traffic, engines, faults, and what came of it.

`traffic` reads traces and makes arrivals, `engine` models a batching engine, `world` runs a scenario, `invariants`
watches it after every event, `measure` computes figures from a result, `report` shows them. Nothing here sleeps,
reads a clock to decide anything, or opens a socket; the same scenario gives the same result.
"""
