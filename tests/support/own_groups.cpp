#include "tests/support/ranks.h"

const lockstep::testing::OwnGroups own_groups;
