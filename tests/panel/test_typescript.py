from workbench.panel import typescript


def test_the_files_are_those_that_the_messages_make():
    written = {path: path.read_text("utf-8") for path in (typescript.TYPES, typescript.SETTINGS)}
    assert written == typescript.programs(), "run: python -m workbench.panel.typescript"
