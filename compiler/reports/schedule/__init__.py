"""Pipeline schedules as pictures: in the terminal, as SVG, as a page to zoom into, as a trace, and in figures.

Purpose: a function for each form, all of one `Picture`.  Non-goals: schedules and their time (`schedules`), files
(`cli`).
"""
