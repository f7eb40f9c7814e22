"""Plans and runs as text, Chrome traces and pictures: pure functions from frozen values.

No torch and no files here; `teraplan.cli` reads, writes and prints.

    Plan ---> decisions -> plan_text, plan_changes, summary       text
      |------> drawing ---> chrome_trace                          Perfetto
    RunRecord -^    |-----> picture                               matplotlib, an optional extra
"""
