// It is called as one of lockstep's own headers is.
#pragma once
inline constexpr const char* kMine = "mine";
