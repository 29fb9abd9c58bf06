/* NVML for tests. It knows the two GPUs of the driver for tests by their buses; clocks of the second one are lowered
 * by its power every other time, and their power is 120 W in the first three answers. NVML: what starting it returns. Compiled with -DOLD_NVML it has no fields, and power
 * is a mean. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned field, scope; long long timestamp, latency; int type, code; union { double d; unsigned u; } value; } Field;

int nvmlInit_v2(void) { const char *code = getenv("NVML"); return code ? atoi(code) : 0; }
const char *nvmlErrorString(int e) { return e == 9 ? "Driver Not Loaded" : "Not Found"; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) {
    unsigned at;
    if (sscanf(bus, "0000:%x:00.0", &at) != 1 || at < 16 || at > 17) return 6;
    return *device = (void *)(size_t)at, 0;
}
int nvmlDeviceGetMaxClockInfo(void *device, unsigned type, unsigned *mhz) { (void)device; return *mhz = 1980, type != 1; }
int nvmlDeviceGetClockInfo(void *device, unsigned type, unsigned *mhz) { return *mhz = (size_t)device == 16 ? 1980 : 1410, type != 1; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    static int asked;
    /* Idle, and for the second what the limit of power does. */
    return *reasons = (size_t)device == 16 ? 1 : asked++ % 2 ? 4 : 0, 0;
}
static unsigned power(void *device, unsigned milliwatts) {
    static int asked[2];
    return asked[(size_t)device - 16]++ < 3 ? 120000 : milliwatts;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { return *milliwatts = power(device, 90500), 0; }
#ifndef OLD_NVML
int nvmlDeviceGetFieldValues(void *device, int count, Field *field) {
    if (count != 1 || field->field != 186 || field->scope != 0) return 2;
    return field->code = 0, field->value.u = power(device, 698250), 0;
}
#endif
