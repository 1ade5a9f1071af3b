"""Pipeline schedules as pictures: in the terminal, as SVG, as a page to zoom into, as a trace,
and in figures.
"""
