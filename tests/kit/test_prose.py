"""Each tic is found in a sentence that has it, and the sentence that a native writer would use has none."""

from tests.kit.prose import TICS, tics

EXAMPLES = {
    "what as a noun": ("Print what a run has.", "Print the settings."),
    "opening with What, Whether, Where, How": ("Whether it is full.", "True if it is full."),
    "trailing which": ("A list, which is sorted.", "A sorted list."),
    "that of": ("The rate is that of the run.", "It is the run's rate."),
    "is none": ("There is none.", "It does not exist."),
    "alone for only": ("By the step alone.", "Only by the step."),
    "as it was": ("It stays as it was.", "It stays unchanged."),
    "asked": ("As was asked.", "As requested."),
    "of its own": ("In a process of its own.", "In a separate process."),
    "bare else": ("The column, else the row.", "The column, otherwise the row."),
    "told": ("It is told once.", "It is reported once."),
    "stands": ("It stands below.", "It is below."),
    "elsewhere": ("The file is elsewhere.", "The file is in another folder."),
    "beside": ("Beside the file.", "Next to the file."),
    "goes on": ("The run goes on.", "The run continues."),
    "somebody": ("Nobody reads it.", "It is not read."),
    "anew": ("It is read anew.", "It is read again."),
    "see as a docstring": ('"""See `X`."""', '"""Return X."""'),
}


def test_every_tic_is_found_and_plain_english_is_not() -> None:
    assert EXAMPLES.keys() == TICS.keys()
    for name, (sentence, better) in EXAMPLES.items():
        assert name in dict(tics(sentence))
        assert not list(tics(better))
