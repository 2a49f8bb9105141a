#!/usr/bin/env bash
# Builds the site into build/docs: pages of tools/docs, the READMEs of the tree, and the reference,
# which is generated from the code. Warnings are errors. Open build/docs/index.html.
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
python=.venv/bin/python
# Install what is missing, such as everything in a fresh clone.
"$python" -c "import furo, mpigossip, myst_parser, sphinx, sphinx_copybutton, torch" 2>/dev/null ||
    install_into .venv docs
begin=$SECONDS
rm -rf build/docs-source
"$python" tools/docs/gather.py build/docs-source
"$python" tools/docs/reference.py build/docs-source/reference
"$python" -m sphinx -W --keep-going -q -d build/docs-cache -c tools/docs build/docs-source build/docs
say "build/docs/index.html, built in $((SECONDS - begin)) s"
