#!/bin/sh
# Puts the C++ headers of ONNX Runtime (API 29, MIT) into DEST. Headers are all that the build
# needs: the library itself is loaded at run time.
#
#   fetch_headers.sh DEST
#
# Does nothing where ORT_HOME or the system's include directories already have them, or where DEST
# was filled before. Needs npm, tar and python3; downloads 150 MB once.
set -eu

package=com.github.asus4.onnxruntime
version=0.4.9
tarball_sha256=e59788788818fdde1b2e522e766a21ba0f7d8391de55737abf81e32cc801785d
header=onnxruntime_cxx_api.h

if [ $# -ne 1 ]; then
    echo "usage: fetch_headers.sh DEST" >&2
    exit 2
fi
dest=$1

if [ -n "${ORT_HOME:-}" ]; then
    for directory in "$ORT_HOME/include" "$ORT_HOME/include/onnxruntime" "$ORT_HOME/headers"; do
        [ -f "$directory/$header" ] && echo "using $directory" && exit 0
    done
fi
for directory in /usr/include /usr/include/onnxruntime /usr/local/include /usr/local/include/onnxruntime; do
    [ -f "$directory/$header" ] && echo "using $directory" && exit 0
done
[ -f "$dest/$header" ] && echo "using $dest" && exit 0

parent=$(dirname "$dest")
mkdir -p "$parent"
work=$(mktemp -d "$parent/.ort-headers.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

npm pack --silent --pack-destination "$work" "$package@$version" >/dev/null
tarball=$work/$package-$version.tgz
actual=$(python3 -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$tarball")
if [ "$actual" != "$tarball_sha256" ]; then
    echo "error: $package@$version has SHA-256 $actual, expected $tarball_sha256" >&2
    exit 1
fi
tar -xzf "$tarball" -C "$work" package/Plugins/Android/onnxruntime.aar
python3 - "$work/package/Plugins/Android/onnxruntime.aar" "$work" <<'PYTHON'
import sys
import zipfile

with zipfile.ZipFile(sys.argv[1]) as archive:
    archive.extractall(sys.argv[2], [name for name in archive.namelist() if name.startswith("headers/")])
PYTHON

# A rename, so that DEST is whole or absent even if two builds fetch at once.
if ! mv -T "$work/headers" "$dest" 2>/dev/null && [ ! -f "$dest/$header" ]; then
    echo "error: cannot write $dest: remove what is there, or name another directory" >&2
    exit 1
fi
echo "using $dest"
