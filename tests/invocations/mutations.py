"""The ways in which invocations are altered, with their weights."""
import contextlib

from files import replace_path, spoil_directory, spoil_file, spoil_output, strange_name
from surroundings import end_early, other_launcher, set_limit, set_variable, spoil_descriptor, strange_input, surroundings
from words import (add_flag, add_flag_of_another, add_word, bad_value, double_flag, drop_flag, drop_value, drop_word,
                   misspell,
                   other_data, other_file, other_model, other_program, other_spelling, other_subcommand, shuffle, spoil_word)

MUTATIONS = {  # with their weights
    drop_flag: 3, drop_value: 2, double_flag: 2, misspell: 3, other_spelling: 1, bad_value: 6, add_flag: 10,
    add_flag_of_another: 3, shuffle: 2, add_word: 2, drop_word: 2, spoil_word: 3, other_model: 4, other_data: 4,
    other_file: 5, other_subcommand: 1, spoil_file: 8, replace_path: 6, spoil_directory: 4, strange_name: 4,
    strange_input: 3, other_program: 3, end_early: 4, spoil_output: 3, set_variable: 8, other_launcher: 4,
    spoil_descriptor: 3, set_limit: 4, surroundings: 2,
}


def mutate(case, drawn):
    """One mutation, or several."""
    wanted = drawn.choices([1, 2, 3], [6, 3, 1])[0]
    for _ in range(50):
        if len(case.done) >= wanted or not case.words:
            return
        way, = drawn.choices(list(MUTATIONS), list(MUTATIONS.values()))
        with contextlib.suppress(OSError):  # of a file that another mutation has made unusable
            way(case, drawn)
