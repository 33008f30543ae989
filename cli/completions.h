// Completions of shells, from the tables of flags: what packages install.
#pragma once

#include <string>

namespace lockstep::cli {

/// For bash: source it, or have it as /usr/share/bash-completion/completions/lockstep.
std::string bash_completion();
/// For zsh: _lockstep in a directory of $fpath, /usr/share/zsh/vendor-completions say.
std::string zsh_completion();
/// For fish: /usr/share/fish/vendor_completions.d/lockstep.fish.
std::string fish_completion();

}  // namespace lockstep::cli
