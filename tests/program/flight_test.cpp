// What the launcher and the ranks say of a rank that crashes, stands still or is slow (tests/program/faulty.cpp).
#include <gtest/gtest.h>
TEST(Flight, X) {}
