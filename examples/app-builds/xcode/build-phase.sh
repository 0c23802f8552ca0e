#!/bin/sh
# Run Script phase: builds a training package from a recipe and puts it into the app's bundle,
# as the folder "odtpack". Place it before the phase that signs the app.
#
# Input files:  $(SRCROOT)/Training/recipe.toml, $(SRCROOT)/Training/model.onnx
# Output files: $(TARGET_BUILD_DIR)/$(UNLOCALIZED_RESOURCES_FOLDER_PATH)/odtpack/manifest.json
#
# With both lists filled, Xcode runs the phase only when an input has changed.
set -eu

recipe="${ODTPACK_RECIPE:-$SRCROOT/Training/recipe.toml}"
command="${ODTPACK_COMMAND:-odtpack}"
package="$DERIVED_FILE_DIR/odtpack/package"
bundle="$TARGET_BUILD_DIR/$UNLOCALIZED_RESOURCES_FOLDER_PATH/odtpack"

# Xcode starts scripts with few folders on PATH.
PATH="$PATH:/opt/homebrew/bin:/usr/local/bin:$HOME/.local/bin"
export PATH

if ! command -v "$command" > /dev/null; then
    echo "error: $command is not installed: pipx install odtpack, or set ODTPACK_COMMAND" >&2
    exit 1
fi
"$command" build --recipe "$recipe" --out "$package" --if-changed
"$command" install "$package" --ios "$bundle"
