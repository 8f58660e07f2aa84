from workbench.panel import generate_protocol


def test_the_files_are_those_that_the_messages_make():
    written = {path: path.read_text("utf-8") for path in (generate_protocol.TYPES, generate_protocol.SETTINGS)}
    assert written == generate_protocol.programs(), "run: python -m workbench.panel.generate_protocol"
