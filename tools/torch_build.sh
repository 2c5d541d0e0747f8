# Decides which build of torch pip takes. tools/bootstrap and tools/bootstrap_oldest source this file.

# Returns whether this machine has a GPU that torch's build with CUDA could use.
has_gpu() {
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || compgen -G '/proc/driver/nvidia/gpus/*' >/dev/null
}

# offers_cpu_build PYTHON TORCH==VERSION: returns whether the package index of pip has the CPU build of this version.
offers_cpu_build() {
    "$1" -m pip install --quiet --disable-pip-version-check --dry-run --no-deps "$2+cpu" >/dev/null 2>&1
}
