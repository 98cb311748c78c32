/* Answers in NVML's place for two GPUs, so that the bindings and what reads them can be tested
   where no driver is. Functions that are missing here are "not found", as with an old driver. */

#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3 };

typedef int Return;
typedef struct Gpu *Device;
struct Gpu { int index; unsigned domain, bus; } gpus[2] = {{0, 0, 0x1b}, {1, 1, 0x43}};

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, pci_id, subsystem;
    char bus_id[32];
} PciInfo;

static void fill(PciInfo *info, Device gpu) {
    memset(info, 0, sizeof *info);
    info->domain = gpu->domain;
    info->bus = gpu->bus;
    snprintf(info->bus_id, sizeof info->bus_id, "%08X:%02X:00.0", gpu->domain, gpu->bus);
}

const char *nvmlErrorString(Return code) {
    return code == NOT_SUPPORTED ? "Not Supported" : code == INVALID_ARGUMENT ? "Invalid Argument" : "Other";
}
Return nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
Return nvmlShutdown(void) { return SUCCESS; }
Return nvmlSystemGetDriverVersion(char *text, unsigned n) { snprintf(text, n, "580.00"); return SUCCESS; }
Return nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return SUCCESS; }
Return nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return SUCCESS; }
Return nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *gpu) { *gpu = &gpus[i]; return SUCCESS; }
Return nvmlDeviceGetName(Device gpu, char *text, unsigned n) { snprintf(text, n, "Stand-in GPU"); return SUCCESS; }
Return nvmlDeviceGetUUID(Device gpu, char *text, unsigned n) { snprintf(text, n, "GPU-%d", gpu->index); return SUCCESS; }
Return nvmlDeviceGetPciInfo_v3(Device gpu, PciInfo *info) { fill(info, gpu); return SUCCESS; }
Return nvmlDeviceGetMemoryInfo(Device gpu, unsigned long long *total_free_used) {
    total_free_used[0] = 80ull << 30;
    total_free_used[1] = 79ull << 30;
    total_free_used[2] = 1ull << 30;
    return SUCCESS;
}
Return nvmlDeviceGetEnforcedPowerLimit(Device gpu, unsigned *milliwatts) { *milliwatts = 700000; return SUCCESS; }
Return nvmlDeviceGetPersistenceMode(Device gpu, unsigned *on) { *on = 1; return SUCCESS; }
Return nvmlDeviceGetMigMode(Device gpu, unsigned *now, unsigned *next) { *now = *next = 0; return SUCCESS; }
Return nvmlDeviceGetCurrentClocksEventReasons(Device gpu, unsigned long long *bits) { *bits = 0x41; return SUCCESS; }
Return nvmlDeviceGetTemperature(Device gpu, int sensor, unsigned *degrees) { return NOT_SUPPORTED; }
Return nvmlDeviceGetTemperatureV(Device gpu, void *temperature) { return NOT_SUPPORTED; }
Return nvmlDeviceGetTotalEccErrors(Device gpu, int severity, int life, unsigned long long *count) {
    *count = severity == 1 && life == 0 ? 5 : 0;
    return SUCCESS;
}
Return nvmlDeviceGetRemappedRows(Device gpu, unsigned *few, unsigned *many, unsigned *pending, unsigned *failed) {
    *few = *many = *failed = 0;
    *pending = 1;
    return SUCCESS;
}

/* The first GPU has four links, the last of them down; the second has none. */
Return nvmlDeviceGetNvLinkState(Device gpu, unsigned link, unsigned *active) {
    if (gpu->index == 1) return NOT_SUPPORTED;
    if (link > 3) return INVALID_ARGUMENT;
    *active = link < 3;
    return SUCCESS;
}
Return nvmlDeviceGetNvLinkRemotePciInfo_v2(Device gpu, unsigned link, PciInfo *info) {
    if (link > 2) return NOT_SUPPORTED;
    fill(info, &gpus[1]);
    return SUCCESS;
}
Return nvmlDeviceGetNvLinkRemoteDeviceType(Device gpu, unsigned link, int *type) { *type = 0; return SUCCESS; }
Return nvmlDeviceGetNvLinkErrorCounter(Device gpu, unsigned link, int counter, unsigned long long *count) {
    *count = counter == 2 ? link : 0;
    return SUCCESS;
}

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    int type;
    Return code;
    union { double d; unsigned u; unsigned long long ull; } value;
} FieldValue;
Return nvmlDeviceGetFieldValues(Device gpu, int count, FieldValue *values) {
    for (int i = 0; i < count; i++) {
        values[i].code = values[i].field == 164 ? SUCCESS : NOT_SUPPORTED;
        values[i].type = 1;
        values[i].value.ull = 0xdead00000000ull | 26562; /* only the lower half is an unsigned int */
    }
    return SUCCESS;
}

Return nvmlDeviceGetP2PStatus(Device a, Device b, int what, int *status) { *status = a->index == 1; return SUCCESS; }
Return nvmlDeviceGetTopologyCommonAncestor(Device a, Device b, int *level) { *level = 50; return SUCCESS; }
