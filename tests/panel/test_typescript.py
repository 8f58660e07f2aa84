from workbench.panel import typescript


def test_the_types_of_the_extension_are_those_of_python():
    assert typescript.FILE.read_text("utf-8") == typescript.program(), "run: python -m workbench.panel.typescript"
