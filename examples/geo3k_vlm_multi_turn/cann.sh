# Sourced: sources the set_env.sh of the CANN that ASCEND_HOME_PATH or ASCEND_TOOLKIT_HOME names, or
# else of one where its installer puts it; ends the shell with 2 where there is none.
find_cann() {
    local home root
    for home in "${ASCEND_HOME_PATH:-}" "${ASCEND_TOOLKIT_HOME:-}"; do
        [[ -n $home ]] || continue
        for root in "$home" "$(dirname -- "$home")"; do
            [[ -f $root/set_env.sh ]] && echo "$root/set_env.sh" && return
        done
        echo "$home is no CANN: there is no set_env.sh in it, nor beside it" >&2
        return 1
    done
    for root in /usr/local/Ascend "$HOME/Ascend"; do
        for home in cann ascend-toolkit; do
            [[ -f $root/$home/set_env.sh ]] && echo "$root/$home/set_env.sh" && return
        done
    done
    echo "no CANN found in /usr/local/Ascend or $HOME/Ascend: install it, or name it in ASCEND_HOME_PATH" >&2
    return 1
}
cann=$(find_cann) || exit 2
set +u # it reads variables that may be unset
# shellcheck disable=SC1090
source "$cann"
set -u
