// Nothing: the program exists for its precompiled headers (cmake/LockstepTest.cmake).
int main() {}
