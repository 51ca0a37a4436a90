/* A fake libnvidia-ml.so.1 for the tests: it says what the text file named by FAKE_NVML_SPEC says, read anew on each call,
 * so that a test changes the machine under a running reader by writing the file.
 *
 *     driver 580.95.05                    version of the driver
 *     gpu uuid=GPU-a mem=16384 ...        one GPU (1 to 16); the order is the index. Keys and their defaults:
 *         model=Fake_GPU ('_' is a space)  mem=16384 reserved=0 used=0 (MiB)  util=0  temp=30  power=50000  minor=<index>
 *         bus=<index+1> (PCI bus number)   mig=0   remapfail=0 (row remapper)   recovery=0 (recovery action that the driver asks for)
 *     mig gpu=0 uuid=MIG-a mem=16384 gi=7 ci=0 slices=1 used=0    one MIG instance; it counts as a device of its own
 *     process gpu=0 pid=100 mem=500       on a GPU, or `mig=0` on the MIG instance of that line number; mem=-1 is "not available"
 *     topology 0 1 40                     common ancestor of two GPUs; 50 (system) unless said
 *     nvlink 0 3 peer=1                   active link 3 of GPU 0 to GPU 1; `switch=1` instead of peer: to an NVSwitch;
 *                                         active=0: there, but down. Links of a GPU up to its highest number exist, then INVALID_ARGUMENT
 *     error DeviceGetUtilizationRates 3   that getter returns that nvmlReturn_t; with `@0` for GPU 0 only: error DeviceGetUUID@0 15
 *                                         `error any@2 15`: every getter of GPU 2, as when it has fallen off the bus
 *     hang DeviceGetCount /path           that getter returns only when the path exists no longer
 *     xid 1 gpu=0 code=79 gi=7 ci=0       an event (gi, ci only on MIG), handed out once: the first number (1, 2, ...) is its place in time
 *
 * Layouts are those of the public nvml.h. Compiled with -DNO_V3 it lacks what drivers before 510 lacked. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_GPUS 16
#define MAX_DEVICES 80
#define MIB (1ULL << 20)
enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       TIMED_OUT = 10, VERSION_MISMATCH = 25 };
typedef unsigned long long u64;
typedef struct device { char uuid[96], model[96]; long mem, reserved, used, util, temp, power, minor, bus, mig, remapfail,
                        recovery, gi, ci, slices; int index, parent; } device;
typedef struct { unsigned pid; u64 memory; unsigned gi, ci; } process;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { u64 total, free, used; } memory_v1;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2;
typedef struct { unsigned sms, copy, decoder, encoder, jpeg, ofa, gi_slices, ci_slices; u64 memory_mb; } attributes;
typedef struct { void *device; u64 type, data; unsigned gi, ci; } event;
typedef struct { unsigned id, scope; long long at, latency; unsigned type; int result; union { unsigned u; u64 ull; } value; } field;

static device devices[MAX_DEVICES]; /* GPUs first, by index; then MIG instances. A handle is the address of one. */
static int gpus, all, initialized, registered[MAX_DEVICES], events_given;

static FILE *spec(void) {
    static char last[512];
    const char *path = getenv("FAKE_NVML_SPEC");
    if (path && strcmp(path, last)) { /* another file is another machine: none of its events were given yet */
        snprintf(last, sizeof last, "%s", path);
        events_given = 0;
    }
    return path ? fopen(path, "r") : NULL;
}

static const char *text(const char *line, const char *key) {
    static char value[128];
    char pattern[40];
    snprintf(pattern, sizeof pattern, " %s=", key);
    const char *at = strstr(line, pattern);
    return at && sscanf(at + strlen(pattern), "%127s", value) == 1 ? value : NULL;
}

static long number(const char *line, const char *key, long otherwise) {
    const char *value = text(line, key);
    return value ? strtol(value, NULL, 10) : otherwise;
}

static void read_device(const char *line, device *d, int index, int parent) {
    memset(d, 0, sizeof *d);
    const char *value = text(line, "uuid");
    snprintf(d->uuid, sizeof d->uuid, "%s", value ? value : "GPU-unnamed");
    value = text(line, "model");
    snprintf(d->model, sizeof d->model, "%s", value ? value : "Fake_GPU");
    for (char *c = d->model; *c; c++) if (*c == '_') *c = ' ';
    d->index = index; d->parent = parent;
    d->mem = number(line, "mem", 16384); d->reserved = number(line, "reserved", 0); d->used = number(line, "used", 0);
    d->util = number(line, "util", 0); d->temp = number(line, "temp", 30); d->power = number(line, "power", 50000);
    d->minor = number(line, "minor", index); d->bus = number(line, "bus", index + 1); d->mig = number(line, "mig", 0);
    d->remapfail = number(line, "remapfail", 0); d->recovery = number(line, "recovery", 0);
    d->gi = number(line, "gi", 0); d->ci = number(line, "ci", 0); d->slices = number(line, "slices", 1);
}

static void read_spec(void) {
    char line[512];
    gpus = all = 0;
    for (int pass = 0; pass < 2; pass++) {
        FILE *f = spec();
        while (f && fgets(line, sizeof line, f)) {
            if (pass == 0 && !strncmp(line, "gpu ", 4) && gpus < MAX_GPUS) { read_device(line, &devices[gpus], gpus, -1); gpus++; }
            if (pass == 1 && !strncmp(line, "mig ", 4) && all < MAX_DEVICES) {
                read_device(line, &devices[all], all - gpus, (int)number(line, "gpu", 0)); all++;
            }
        }
        if (f) fclose(f);
        if (pass == 0) all = gpus;
    }
}

/* What the spec says instead of an answer: an error, or a wait. `d` may be NULL. Also reads the devices anew. */
static int said(const char *name, const device *d) {
    char line[512], which[80], path[300];
    int code, result = initialized ? OK : UNINITIALIZED;
    read_spec();
    FILE *f = spec();
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "error %79s %d", which, &code) == 2) {
            char *at = strchr(which, '@');
            if (at) *at++ = 0;
            if ((!strcmp(which, name) || !strcmp(which, "any")) && (!at || (d && (d->parent < 0 ? d->index : d->parent) == atoi(at)))) result = code;
        } else if (sscanf(line, "hang %79s %299s", which, path) == 2 && !strcmp(which, name)) {
            while (!access(path, F_OK)) usleep(2000);
        }
    }
    if (f) fclose(f);
    return result;
}

#define ASK(name, d) do { int code_ = said(name, d); if (code_) return code_; } while (0)

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int before = initialized;
    initialized = 1;
    int code = said("Init", NULL);
    if (code) { initialized = before; return code; }
    initialized = before + 1;
    return OK;
}
int nvmlShutdown(void) { if (!initialized) return UNINITIALIZED; initialized--; return OK; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    char line[512], version[80] = "580.95.05";
    ASK("SystemGetDriverVersion", NULL);
    FILE *f = spec();
    while (f && fgets(line, sizeof line, f)) sscanf(line, "driver %79s", version);
    if (f) fclose(f);
    snprintf(out, size, "%s", version);
    return OK;
}
int nvmlDeviceGetCount_v2(unsigned *out) { ASK("DeviceGetCount", NULL); *out = (unsigned)gpus; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **out) {
    read_spec();
    if ((int)index >= gpus) return INVALID_ARGUMENT;
    ASK("DeviceGetHandleByIndex", &devices[index]);
    *out = &devices[index];
    return OK;
}

#define GETTER(name, type, expression)                                  \
    int nvml##name(device *d, type *out) { ASK(#name, d); *out = (expression); return OK; }
#define GPU_GETTER(name, type, expression)                              \
    int nvml##name(device *d, type *out) { ASK(#name, d); if (d->parent >= 0) return NOT_SUPPORTED; *out = (expression); return OK; }

int nvmlDeviceGetUUID(device *d, char *out, unsigned size) { ASK("DeviceGetUUID", d); snprintf(out, size, "%s", d->uuid); return OK; }
int nvmlDeviceGetName(device *d, char *out, unsigned size) { ASK("DeviceGetName", d); snprintf(out, size, "%s", d->model); return OK; }
GPU_GETTER(DeviceGetMinorNumber, unsigned, (unsigned)d->minor)
GPU_GETTER(DeviceGetPowerUsage, unsigned, (unsigned)d->power)
GETTER(DeviceGetMemoryInfo, memory_v1,
       ((memory_v1){d->mem * MIB, (d->mem - d->used - d->reserved) * MIB, (d->used + d->reserved) * MIB}))

#ifndef NO_V3
int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *out) {
    ASK("DeviceGetMemoryInfo_v2", d);
    if (out->version != (sizeof *out | 2 << 24)) return VERSION_MISMATCH;
    out->total = d->mem * MIB; out->reserved = d->reserved * MIB; out->used = d->used * MIB;
    out->free = (d->mem - d->reserved - d->used) * MIB;
    return OK;
}
#endif

int nvmlDeviceGetUtilizationRates(device *d, unsigned out[2]) {
    ASK("DeviceGetUtilizationRates", d);
    if (d->parent >= 0) return NOT_SUPPORTED;
    out[0] = (unsigned)d->util; out[1] = 0;
    return OK;
}
int nvmlDeviceGetTemperature(device *d, int sensor, unsigned *out) {
    (void)sensor;
    ASK("DeviceGetTemperature", d);
    if (d->parent >= 0) return NOT_SUPPORTED;
    *out = (unsigned)d->temp;
    return OK;
}
int nvmlDeviceGetRemappedRows(device *d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    ASK("DeviceGetRemappedRows", d);
    *corrected = *uncorrected = 0; *pending = 0; *failure = (unsigned)d->remapfail;
    return OK;
}

int nvmlDeviceGetFieldValues(device *d, int count, field *out) {
    ASK("DeviceGetFieldValues", d);
    for (int i = 0; i < count; i++) {
        out[i].result = out[i].id == 230 ? OK : NOT_SUPPORTED; /* 230: the recovery action */
        out[i].value.u = (unsigned)d->recovery;
    }
    return OK;
}

static void fill_pci(pci_info *out, long bus) {
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)bus;
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", (unsigned)bus);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", (unsigned)bus);
}
int nvmlDeviceGetPciInfo_v3(device *d, pci_info *out) { ASK("DeviceGetPciInfo", d); fill_pci(out, d->bus); return OK; }

int nvmlDeviceGetTopologyCommonAncestor(device *a, device *b, unsigned *level) {
    char line[512];
    int first, second;
    unsigned said_level;
    ASK("DeviceGetTopologyCommonAncestor", a);
    *level = 50;
    FILE *f = spec();
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "topology %d %d %u", &first, &second, &said_level) == 3 &&
            ((first == a->index && second == b->index) || (first == b->index && second == a->index))) *level = said_level;
    if (f) fclose(f);
    return OK;
}

/* The line of one NVLink of a GPU. Links below the highest listed one exist and are down. */
static int find_link(const device *d, unsigned link, char found[512]) {
    char line[512];
    int gpu, n, highest = -1;
    found[0] = 0;
    FILE *f = spec();
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "nvlink %d %d", &gpu, &n) == 2 && gpu == d->index) {
            if (n > highest) highest = n;
            if (n == (int)link) strcpy(found, line);
        }
    if (f) fclose(f);
    return highest < 0 ? NOT_SUPPORTED : (int)link > highest ? INVALID_ARGUMENT : OK;
}
int nvmlDeviceGetNvLinkState(device *d, unsigned link, unsigned *active) {
    char line[512];
    ASK("DeviceGetNvLinkState", d);
    int code = find_link(d, link, line);
    if (!code) *active = line[0] && number(line, "active", 1);
    return code;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(device *d, unsigned link, unsigned *type) {
    char line[512];
    ASK("DeviceGetNvLinkRemoteDeviceType", d);
    int code = find_link(d, link, line);
    if (!code) *type = text(line, "switch") ? 2 : text(line, "peer") ? 0 : 0xff;
    return code;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(device *d, unsigned link, pci_info *out) {
    char line[512];
    ASK("DeviceGetNvLinkRemotePciInfo", d);
    int code = find_link(d, link, line);
    long peer = number(line, "peer", -1);
    if (!code) fill_pci(out, peer >= 0 ? devices[peer].bus : 200);
    return code;
}

int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    ASK("DeviceGetMigMode", d);
    *current = *pending = (unsigned)d->mig;
    return OK;
}
GETTER(DeviceGetMaxMigDeviceCount, unsigned, d->mig ? 7 : 0)
GETTER(DeviceGetGpuInstanceId, unsigned, (unsigned)d->gi)
GETTER(DeviceGetComputeInstanceId, unsigned, (unsigned)d->ci)
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **out) {
    ASK("DeviceGetMigDeviceHandleByIndex", d);
    for (int i = gpus; i < all; i++)
        if (devices[i].parent == d->index && index-- == 0) { *out = &devices[i]; return OK; }
    return NOT_FOUND;
}
int nvmlDeviceGetAttributes_v2(device *d, attributes *out) {
    ASK("DeviceGetAttributes", d);
    if (d->parent < 0) return NOT_SUPPORTED; /* as the real one, which has attributes of MIG instances only */
    memset(out, 0, sizeof *out);
    out->sms = 16 * (unsigned)d->slices; out->gi_slices = out->ci_slices = (unsigned)d->slices; out->memory_mb = (u64)d->mem;
    return OK;
}

static int processes(const char *name, device *d, unsigned *count, process *out) {
    char line[512];
    unsigned n = 0, room = *count;
    ASK(name, d);
    FILE *f = spec();
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "process ", 8) || number(line, d->parent < 0 ? "gpu" : "mig", -1) != d->index) continue;
        if (out && n < room)
            out[n] = (process){(unsigned)number(line, "pid", 1), number(line, "mem", 0) < 0 ? ~0ULL : number(line, "mem", 0) * MIB,
                               d->parent < 0 ? ~0u : (unsigned)d->gi, d->parent < 0 ? ~0u : (unsigned)d->ci};
        n++;
    }
    if (f) fclose(f);
    *count = n;
    return n > (out ? room : 0) ? INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetComputeRunningProcesses_v2(device *d, unsigned *n, process *out) { return processes("Processes_v2", d, n, out); }
#ifndef NO_V3
int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *n, process *out) { return processes("Processes_v3", d, n, out); }
#endif

int nvmlEventSetCreate(void **out) {
    char line[512];
    int place;
    ASK("EventSetCreate", NULL);
    memset(registered, 0, sizeof registered);
    FILE *f = spec(); /* a new set has none of the events of before */
    while (f && fgets(line, sizeof line, f)) if (sscanf(line, "xid %d", &place) == 1) events_given = place;
    if (f) fclose(f);
    *out = &registered;
    return OK;
}
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(device *d, u64 types, void *set) {
    (void)types; (void)set;
    ASK("DeviceRegisterEvents", d);
    registered[d->index] = 1;
    return OK;
}
int nvmlEventSetWait_v2(void *set, event *out, unsigned timeout_ms) {
    char line[512];
    int place;
    (void)set; (void)timeout_ms;
    ASK("EventSetWait", NULL);
    FILE *f = spec();
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "xid %d", &place) != 1 || place <= events_given || !registered[number(line, "gpu", 0)]) continue;
        events_given = place;
        *out = (event){&devices[number(line, "gpu", 0)], 8, (u64)number(line, "code", 0),
                       (unsigned)number(line, "gi", -1), (unsigned)number(line, "ci", -1)};
        fclose(f);
        return OK;
    }
    if (f) fclose(f);
    return TIMED_OUT;
}
