// The tests of Device, with the emulated GPU in the place of a real one: they run device.cu.
#include "test/unit/device_test.cpp"
