"""`emu fabric`: a live fabric that stays up between commands, its picture, its faults.

    emu fabric up --planes 2 --t0 2 --t1 2 --hosts 2 --rate 100M     # or: up SCENARIO, with a table [fabric]
    emu fabric show --svg fabric.svg
    emu fabric fault p0-t0-0:p0-t1-1 loss=0.01
    emu fabric down

``spec`` is the scenario's table, ``holder`` the process that has the fabric, ``client`` the verbs, ``picture`` SVG.
"""
