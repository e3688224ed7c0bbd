/* A driver's NVML with the answers of one described machine, so that the real pynvml can be driven from end to end.
 * machine.h, made from a JSON description, holds the answers; WITHOUT_<function> leaves a function out, as old drivers
 * do. Names, arguments and numbers are those of NVIDIA's nvml.h.
 */
#include <string.h>

#include "machine.h"

typedef int status;
enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} pci_info;

typedef struct {
    unsigned long long total, free, used;
} memory_info;

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    status result;
    unsigned clique, state, health;
} fabric_info;

#define LOST_CHECK(gpu)            \
    if ((gpu)->failure) {          \
        return (gpu)->failure;     \
    }

static void copy_text(char *to, const char *from, unsigned size) {
    strncpy(to, from, size - 1);
    to[size - 1] = 0;
}

static int number_of(const struct gpu *gpu) { return (int)(gpu - gpus); }

static int is_slice(const void *handle) {
    return (const char *)handle >= (const char *)slices && (const char *)handle < (const char *)(slices + SLICES);
}

status nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    return INIT_RESULT;
}
status nvmlShutdown(void) { return OK; }

/* pynvml asks for the text of codes that it has no class for. */
const char *nvmlErrorString(status code) {
    (void)code;
    return "an error of the fake driver";
}

status nvmlSystemGetDriverVersion(char *text, unsigned size) {
    copy_text(text, DRIVER_VERSION, size);
    return OK;
}
status nvmlSystemGetCudaDriverVersion(int *version) {
    *version = CUDA_VERSION;
    return OK;
}
status nvmlDeviceGetCount_v2(unsigned *count) {
    *count = GPUS;
    return OK;
}
status nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **gpu) {
    if (index >= GPUS) return INVALID_ARGUMENT;
    *gpu = &gpus[index];
    return gpus[index].handle_failure;
}
status nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    if (is_slice(handle)) {
        copy_text(text, ((struct slice *)handle)->name, size);
        return OK;
    }
    LOST_CHECK((struct gpu *)handle)
    copy_text(text, ((struct gpu *)handle)->name, size);
    return OK;
}
status nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    if (is_slice(handle)) {
        copy_text(text, ((struct slice *)handle)->uuid, size);
        return OK;
    }
    LOST_CHECK((struct gpu *)handle)
    copy_text(text, ((struct gpu *)handle)->uuid, size);
    return OK;
}
status nvmlDeviceGetMemoryInfo(void *handle, memory_info *memory) {
    if (is_slice(handle)) {
        memory->total = ((struct slice *)handle)->memory;
        memory->used = 0;
        memory->free = memory->total;
        return OK;
    }
    struct gpu *gpu = handle;
    LOST_CHECK(gpu)
    if (gpu->memory_failure) return gpu->memory_failure;
    memory->total = gpu->memory;
    memory->used = gpu->used;
    memory->free = gpu->memory - gpu->used;
    return OK;
}
status nvmlDeviceGetPciInfo_v3(struct gpu *gpu, pci_info *pci) {
    LOST_CHECK(gpu)
    memset(pci, 0, sizeof *pci);
    copy_text(pci->bus_id, gpu->bus_id, sizeof pci->bus_id);
    return OK;
}
status nvmlDeviceGetCudaComputeCapability(struct gpu *gpu, int *major, int *minor) {
    LOST_CHECK(gpu)
    *major = gpu->major;
    *minor = gpu->minor;
    return OK;
}
status nvmlDeviceGetEccMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    LOST_CHECK(gpu)
    if (gpu->ecc < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)gpu->ecc;
    return OK;
}
status nvmlDeviceGetEnforcedPowerLimit(struct gpu *gpu, unsigned *milliwatts) {
    LOST_CHECK(gpu)
    if (gpu->power_failure) return gpu->power_failure;
    *milliwatts = gpu->milliwatts;
    return OK;
}
typedef struct {
    unsigned gpu, memory;
} utilization;

status nvmlDeviceGetUtilizationRates(struct gpu *gpu, utilization *use) {
    LOST_CHECK(gpu)
    if (gpu->busy < 0) return NOT_SUPPORTED;
    use->gpu = (unsigned)gpu->busy;
    use->memory = 0;
    return OK;
}
status nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned *milliwatts) {
    LOST_CHECK(gpu)
    *milliwatts = (unsigned)(gpu->milliwatts / 2);
    return OK;
}
status nvmlDeviceGetTemperature(struct gpu *gpu, unsigned sensor, unsigned *degrees) {
    (void)sensor;
    LOST_CHECK(gpu)
    *degrees = 61;
    return OK;
}
status nvmlDeviceGetClockInfo(struct gpu *gpu, unsigned clock, unsigned *rate) {
    (void)clock;
    LOST_CHECK(gpu)
    *rate = (unsigned)gpu->clock;
    return OK;
}
status nvmlDeviceGetMaxClockInfo(struct gpu *gpu, unsigned clock, unsigned *rate) {
    (void)clock;
    LOST_CHECK(gpu)
    *rate = 1980;
    return OK;
}
#ifdef WITHOUT_nvmlDeviceGetCurrentClocksEventReasons
status nvmlDeviceGetCurrentClocksThrottleReasons(struct gpu *gpu, unsigned long long *reasons) {
#else
status nvmlDeviceGetCurrentClocksEventReasons(struct gpu *gpu, unsigned long long *reasons) {
#endif
    LOST_CHECK(gpu)
    *reasons = (unsigned long long)gpu->slowed_by;
    return OK;
}
status nvmlDeviceGetTotalEccErrors(struct gpu *gpu, unsigned kind, unsigned counter, unsigned long long *errors) {
    LOST_CHECK(gpu)
    if (gpu->ecc < 0) return NOT_SUPPORTED;
    if (kind != 1 || counter != 0) return INVALID_ARGUMENT;
    *errors = (unsigned long long)gpu->ecc_errors;
    return OK;
}
#define PCIE_ANSWER(function, value)                      \
    status function(struct gpu *gpu, unsigned *answer) {  \
        LOST_CHECK(gpu)                                   \
        *answer = (value);                                \
        return OK;                                        \
    }
PCIE_ANSWER(nvmlDeviceGetCurrPcieLinkGeneration, gpu->pcie_generation)
PCIE_ANSWER(nvmlDeviceGetMaxPcieLinkGeneration, gpu->pcie_generation)
PCIE_ANSWER(nvmlDeviceGetCurrPcieLinkWidth, gpu->pcie_width)
PCIE_ANSWER(nvmlDeviceGetMaxPcieLinkWidth, 16)

#ifndef WITHOUT_nvmlDeviceGetMigMode
status nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    LOST_CHECK(gpu)
    if (gpu->mig < 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)gpu->mig;
    return OK;
}
status nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *count) {
    LOST_CHECK(gpu)
    *count = gpu->mig < 0 ? 0 : 7;
    return OK;
}
status nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, struct slice **slice) {
    LOST_CHECK(gpu)
    unsigned seen = 0;
    for (unsigned number = 0; number < SLICES; number++) {
        if (slices[number].gpu == number_of(gpu) && seen++ == index) {
            *slice = &slices[number];
            return OK;
        }
    }
    return NOT_FOUND;
}
#endif

#ifndef WITHOUT_nvmlDeviceGetMemoryAffinity
status nvmlDeviceGetMemoryAffinity(struct gpu *gpu, unsigned words, unsigned long *mask, unsigned scope) {
    (void)scope;
    LOST_CHECK(gpu)
    memset(mask, 0, words * sizeof *mask);
    if (gpu->numa < 0) return NOT_SUPPORTED;
    mask[gpu->numa / 64] = 1ul << gpu->numa % 64;
    return OK;
}
status nvmlDeviceGetCpuAffinityWithinScope(struct gpu *gpu, unsigned words, unsigned long *mask, unsigned scope) {
    (void)scope;
    LOST_CHECK(gpu)
    memset(mask, 0, words * sizeof *mask);
    if (gpu->first_cpu < 0) return NOT_SUPPORTED;
    for (int cpu = gpu->first_cpu; cpu <= gpu->last_cpu; cpu++) mask[cpu / 64] |= 1ul << cpu % 64;
    return OK;
}
#endif

/* Link numbers run through the peers of a GPU in order, then to the switches. */
static int peer_of_link(const struct gpu *gpu, unsigned link) {
    int row = number_of(gpu);
    for (int peer = 0; peer < GPUS; peer++) {
        if (link < (unsigned)nvlinks[row][peer]) return peer;
        link -= (unsigned)nvlinks[row][peer];
    }
    return link < (unsigned)gpu->switch_links ? GPUS : -1;
}
status nvmlDeviceGetNvLinkState(struct gpu *gpu, unsigned link, unsigned *active) {
    LOST_CHECK(gpu)
    if (gpu->mig > 0 || gpu->nvlink_version == 0) return NOT_SUPPORTED;
    int peer = peer_of_link(gpu, link);
    if (peer < 0) return INVALID_ARGUMENT;
    /* The neighbours of a lost GPU see their links to it go down. */
    *active = peer == GPUS || (!gpus[peer].failure && !gpus[peer].handle_failure);
    return OK;
}
status nvmlDeviceGetNvLinkVersion(struct gpu *gpu, unsigned link, unsigned *version) {
    (void)link;
    LOST_CHECK(gpu)
    *version = (unsigned)gpu->nvlink_version;
    return OK;
}
status nvmlDeviceGetNvLinkRemotePciInfo_v2(struct gpu *gpu, unsigned link, pci_info *pci) {
    LOST_CHECK(gpu)
    int peer = peer_of_link(gpu, link);
    if (peer < 0) return INVALID_ARGUMENT;
    memset(pci, 0, sizeof *pci);
    copy_text(pci->bus_id, peer == GPUS ? "00000000:C4:00.0" : gpus[peer].bus_id, sizeof pci->bus_id);
    return OK;
}
#ifndef WITHOUT_nvmlDeviceGetNvLinkRemoteDeviceType
status nvmlDeviceGetNvLinkRemoteDeviceType(struct gpu *gpu, unsigned link, unsigned *type) {
    LOST_CHECK(gpu)
    *type = peer_of_link(gpu, link) == GPUS ? 2 : 0;
    return OK;
}
#endif
#ifndef WITHOUT_nvmlDeviceGetGpuFabricInfoV
status nvmlDeviceGetGpuFabricInfoV(struct gpu *gpu, fabric_info *fabric) {
    LOST_CHECK(gpu)
    if (!gpu->switch_links) return NOT_SUPPORTED;
    memset(fabric->cluster, 0x5a, sizeof fabric->cluster);
    fabric->clique = 1;
    fabric->state = 3;
    return OK;
}
#endif
status nvmlDeviceGetTopologyCommonAncestor(struct gpu *first, struct gpu *second, unsigned *level) {
    LOST_CHECK(first)
    LOST_CHECK(second)
    *level = (unsigned)levels[number_of(first)][number_of(second)];
    return OK;
}
status nvmlDeviceGetP2PStatus(struct gpu *first, struct gpu *second, unsigned question, unsigned *answer) {
    LOST_CHECK(first)
    LOST_CHECK(second)
    *answer = question == 2 && !nvlinks[number_of(first)][number_of(second)] ? 5 : (unsigned)PEER_STATUS;
    return OK;
}
