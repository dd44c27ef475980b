/* loadgen: asks an OpenAI-compatible server for chat completions and measures what comes back.
 *
 * One thread, one epoll loop, keep-alive connections. Either a closed loop (each connection asks again as soon as it is
 * answered) or an open one (--rate: requests at random times that do not depend on the answers; latency counts from the time
 * at which a request was due, so that a stall is charged for everything it delays). With --chunks the answers are
 * streams and the send time that mock_engine puts into each chunk tells how long it was on its way. CPU time and memory of
 * given processes are read at both ends of the measured window. Prints one JSON object; all times in microseconds. It
 * promises to stop after ramp + warm-up + seconds; it never follows redirects and never retries a request.
 *
 *     loadgen --target NAME:PORT [--target ...] [options]
 *
 *     --connections N   per target (64)          --rate R        requests per second and target, open loop
 *     --seconds S       measured (4)             --warmup S      before that, not measured (1)
 *     --ramp S          time to open the connections (0)         --chunks N      ask for streams of N chunks
 *     --choices N       of each answer; a stream has so many times more chunks (1)
 *     --path P          (/v1/chat/completions)   --prompt-bytes N (800)
 *     --key K           bearer key (sk-bench)    --cpu-of PID,PID,...
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    TARGETS_MAX = 8,
    PROCESSES_MAX = 256,
    EVENTS_MAX = 512,
    HEAD_BYTES_MAX = 4096,
    SAMPLES_MAX = 8 * 1000 * 1000, /* per series; further ones are counted in the totals only */
    MARKER_DIGITS = 16,
    DUE_MAX = 1 << 20, /* open loop: requests that wait for a free connection */
};

static const uint64_t SECOND_NS = 1000000000u;

/* ---- Series of durations ---- */

struct series {
    uint32_t *tenths_us; /* up to seven minutes each */
    size_t length;
    size_t capacity;
};

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * SECOND_NS + (uint64_t)time.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "loadgen: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void add_sample(struct series *series, uint64_t duration_ns)
{
    if (series->length == SAMPLES_MAX)
        return;
    if (series->length == series->capacity) {
        series->capacity = series->capacity ? 2 * series->capacity : 1 << 16;
        series->tenths_us = realloc(series->tenths_us, series->capacity * sizeof *series->tenths_us);
        if (!series->tenths_us)
            die("out of memory");
    }
    uint64_t tenths = duration_ns / 100;
    series->tenths_us[series->length++] = tenths > UINT32_MAX ? UINT32_MAX : (uint32_t)tenths;
}

static int compare_samples(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

static double quantile_us(const struct series *sorted, double share)
{
    return sorted->tenths_us[(size_t)(share * (double)(sorted->length - 1))] / 10.0;
}

static void print_series(const char *name, struct series *series)
{
    if (!series->length) {
        printf(",\"%s\":null", name);
        return;
    }
    qsort(series->tenths_us, series->length, sizeof *series->tenths_us, compare_samples);
    printf(",\"%s\":{\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"max\":%.1f}", name, quantile_us(series, 0.5),
           quantile_us(series, 0.9), quantile_us(series, 0.99), quantile_us(series, 1.0));
}

/* ---- Targets, connections, answers ---- */

struct connection;

struct target {
    const char *name;
    struct sockaddr_in address;
    char *request;
    size_t request_length;

    /* Open loop: free connections, and the times of requests that came due while there was none. A queue for each target: a slow
     * one shall not make another's requests late. */
    struct connection *idle;
    uint64_t *due_ns; /* a ring of DUE_MAX */
    size_t due_start, due_length;

    /* Of the measured window. */
    struct series latency;     /* due or sent → last byte of the answer */
    struct series first_chunk; /* due or sent → first chunk's content */
    struct series transit;     /* a chunk's send time → read here */
    unsigned long answers;
    unsigned long refused; /* answered, but not with 200 */
    unsigned long broken;  /* closed or unreadable before the answer's end */
    unsigned long short_streams;
    unsigned long chunks;
    unsigned long connect_errors;
};

/* Where the reader stands in an answer's body. */
enum body_state {
    IN_HEAD,
    IN_BODY,       /* content-length, or until the connection closes */
    IN_CHUNK_SIZE, /* a line with the size of the next chunk */
    IN_CHUNK,      /* its data */
    AFTER_CHUNK,   /* the line end behind the data */
    IN_TRAILER,    /* lines up to an empty one */
};

struct connection {
    int fd;
    struct target *target;
    bool connecting;
    bool busy;
    uint64_t asked_ns; /* when the request was due (open loop) or sent */

    enum body_state body_state;
    char head[HEAD_BYTES_MAX];
    size_t head_length;
    int status;
    bool close_after;
    bool until_close;
    unsigned long long bytes_left; /* of the body or of the chunk */
    size_t line_length;            /* of the chunk size line or trailer line being read */

    int marker_digits; /* -1: outside of a marker */
    uint64_t marker;
    long chunks_seen;

    struct connection *next_idle;
};

static struct target targets[TARGETS_MAX];
static int target_count;
static int epoll_fd;
static bool measuring;
static bool is_open_loop;
static long chunks_wanted; /* 0: plain answers */
static long choices = 1;

static void send_request(struct connection *connection)
{
    struct target *target = connection->target;
    ssize_t written = write(connection->fd, target->request, target->request_length);
    if (written != (ssize_t)target->request_length)
        shutdown(connection->fd, SHUT_RDWR); /* a request always fits an empty socket buffer: the peer is gone, read() will say so */
}

static void ask(struct connection *connection, uint64_t asked_ns)
{
    connection->busy = true;
    connection->asked_ns = asked_ns;
    connection->body_state = IN_HEAD;
    connection->head_length = 0;
    connection->status = 0;
    connection->close_after = connection->until_close = false;
    connection->bytes_left = 0;
    connection->line_length = 0;
    connection->marker_digits = -1;
    connection->chunks_seen = 0;
    if (!connection->connecting)
        send_request(connection);
}

static void open_connection(struct connection *connection)
{
    static const int one = 1;
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection->fd < 0)
        die("no more sockets (ulimit -n)");
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connection->connecting = true;
    if (connect(connection->fd, (struct sockaddr *)&connection->target->address, sizeof connection->target->address) < 0 &&
        errno != EINPROGRESS)
        connection->target->connect_errors++;
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = connection};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, connection->fd, &event);
}

static void reopen_connection(struct connection *connection)
{
    close(connection->fd);
    open_connection(connection);
}

static void become_free(struct connection *connection)
{
    connection->busy = false;
    if (is_open_loop) {
        connection->next_idle = connection->target->idle;
        connection->target->idle = connection;
    } else {
        ask(connection, now_ns());
    }
}

static void count_answer(struct connection *connection, uint64_t now)
{
    struct target *target = connection->target;
    if (!measuring)
        return;
    if (connection->status != 200) {
        target->refused++;
        return;
    }
    target->answers++;
    add_sample(&target->latency, now - connection->asked_ns);
    if (chunks_wanted && connection->chunks_seen != chunks_wanted * choices)
        target->short_streams++;
}

static void end_answer(struct connection *connection, uint64_t now)
{
    count_answer(connection, now);
    if (connection->close_after)
        reopen_connection(connection);
    become_free(connection);
}

static void connection_lost(struct connection *connection)
{
    bool was_busy = connection->busy;
    if (was_busy && connection->until_close && connection->body_state == IN_BODY)
        count_answer(connection, now_ns());
    else if (was_busy && measuring)
        connection->target->broken++;
    if (was_busy && connection->body_state == IN_HEAD)
        usleep(200); /* a server that refuses everything shall not make us spin */
    reopen_connection(connection);
    if (was_busy)
        become_free(connection);
}

/* ---- Reading an answer ---- */

static void count_chunk(struct connection *connection, uint64_t now)
{
    struct target *target = connection->target;
    connection->chunks_seen++;
    if (!measuring)
        return;
    target->chunks++;
    add_sample(&target->transit, now > connection->marker ? now - connection->marker : 0);
    if (connection->chunks_seen == 1)
        add_sample(&target->first_chunk, now - connection->asked_ns);
}

/* Looks for "@" and sixteen hexadecimal digits, which any framing may have split. */
static void scan_markers(struct connection *connection, const char *data, size_t length, uint64_t now)
{
    const char *end = data + length;
    while (data < end) {
        if (connection->marker_digits < 0) {
            data = memchr(data, '@', (size_t)(end - data));
            if (!data)
                return;
            data++;
            connection->marker_digits = 0;
            connection->marker = 0;
            continue;
        }
        unsigned char digit = (unsigned char)*data++;
        connection->marker = connection->marker << 4 | (uint64_t)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
        if (++connection->marker_digits == MARKER_DIGITS) {
            connection->marker_digits = -1;
            count_chunk(connection, now);
        }
    }
}

/* Takes the status and the framing from a whole head. */
static void read_head(struct connection *connection)
{
    const char *head = connection->head;
    bool chunked = false, sized = false;
    connection->status = connection->head_length > 12 ? atoi(head + 9) : 0;
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line + 2, "\r\n")) {
        const char *field = line + 2;
        if (!strncasecmp(field, "content-length:", 15)) {
            sized = true;
            connection->bytes_left = strtoull(field + 15, NULL, 10);
        } else if (!strncasecmp(field, "transfer-encoding:", 18)) {
            chunked = true;
        } else if (!strncasecmp(field, "connection: close", 17)) {
            connection->close_after = true;
        }
    }
    connection->until_close = !chunked && !sized;
    connection->body_state = chunked ? IN_CHUNK_SIZE : IN_BODY;
}

/* Adds bytes to the head. Returns how many of them it took; the head is whole when the state has changed. */
static size_t take_head(struct connection *connection, const char *data, size_t length)
{
    size_t before = connection->head_length;
    size_t room = sizeof connection->head - 1 - before;
    size_t taken = length < room ? length : room;
    memcpy(connection->head + before, data, taken);
    connection->head_length += taken;
    connection->head[connection->head_length] = '\0';
    char *end = memmem(connection->head, connection->head_length, "\r\n\r\n", 4);
    if (!end) {
        if (connection->head_length == sizeof connection->head - 1)
            connection->head_length = before = 0; /* absurd head: read on, the answer will count as broken or refused */
        return taken;
    }
    end[2] = '\0';
    read_head(connection);
    return (size_t)(end + 4 - connection->head) - before;
}

/* Consumes body bytes up to the end of one piece of framing. Returns how many; *ended when the answer is complete. */
static size_t take_body(struct connection *connection, const char *data, size_t length, uint64_t now, bool *ended)
{
    size_t taken = 0;
    switch (connection->body_state) {
    case IN_BODY:
    case IN_CHUNK:
        taken = connection->until_close || length < connection->bytes_left ? length : (size_t)connection->bytes_left;
        if (chunks_wanted)
            scan_markers(connection, data, taken, now);
        if (!connection->until_close)
            connection->bytes_left -= taken;
        if (connection->bytes_left == 0 && connection->body_state == IN_CHUNK)
            connection->body_state = AFTER_CHUNK;
        break;
    case IN_CHUNK_SIZE:
        while (taken < length && data[taken] != '\n') {
            char c = data[taken++];
            if (c >= '0' && c <= '9')
                connection->bytes_left = connection->bytes_left << 4 | (unsigned)(c - '0');
            else if ((c | 32) >= 'a' && (c | 32) <= 'f')
                connection->bytes_left = connection->bytes_left << 4 | (unsigned)((c | 32) - 'a' + 10);
        }
        if (taken < length) {
            taken++;
            connection->line_length = 0;
            connection->body_state = connection->bytes_left ? IN_CHUNK : IN_TRAILER;
        }
        break;
    case AFTER_CHUNK:
        while (taken < length && connection->body_state == AFTER_CHUNK)
            if (data[taken++] == '\n')
                connection->body_state = IN_CHUNK_SIZE;
        break;
    case IN_TRAILER:
        while (taken < length && !*ended) {
            char c = data[taken++];
            if (c == '\n') {
                *ended = connection->line_length == 0;
                connection->line_length = 0;
            } else if (c != '\r') {
                connection->line_length++;
            }
        }
        break;
    case IN_HEAD:
        break;
    }
    if (connection->body_state == IN_BODY && !connection->until_close && connection->bytes_left == 0)
        *ended = true;
    return taken;
}

static void receive(struct connection *connection)
{
    static char buffer[1 << 18];
    ssize_t count = read(connection->fd, buffer, sizeof buffer);
    uint64_t now = now_ns();
    if (count < 0 && errno == EAGAIN)
        return;
    if (count <= 0) {
        connection_lost(connection);
        return;
    }
    const char *data = buffer;
    size_t length = (size_t)count;
    bool ended = false;
    while (connection->busy && !ended) {
        bool nothing_to_come = connection->body_state == IN_BODY && !connection->until_close && !connection->bytes_left;
        if (length == 0 && !nothing_to_come)
            return;
        size_t taken = connection->body_state == IN_HEAD ? take_head(connection, data, length)
                                                         : take_body(connection, data, length, now, &ended);
        data += taken;
        length -= taken;
    }
    if (ended)
        end_answer(connection, now);
}

/* ---- Open loop ---- */

static uint64_t next_arrival_ns;
static unsigned long arrivals, arrivals_late, arrivals_lost;
static int next_target;

static bool ask_idle(struct target *target, uint64_t due_ns)
{
    struct connection *connection = target->idle;
    if (!connection)
        return false;
    target->idle = connection->next_idle;
    ask(connection, due_ns);
    return true;
}

static void queue_due(struct target *target, uint64_t due_ns)
{
    if (target->due_length == DUE_MAX) {
        arrivals_lost++;
        return;
    }
    target->due_ns[(target->due_start + target->due_length++) % DUE_MAX] = due_ns;
    if (measuring)
        arrivals_late++;
}

static void ask_what_is_due(struct target *target)
{
    while (target->due_length && ask_idle(target, target->due_ns[target->due_start])) {
        target->due_start = (target->due_start + 1) % DUE_MAX;
        target->due_length--;
    }
}

static void start_arrivals(uint64_t now, double rate_of_all)
{
    for (int i = 0; i < target_count; i++)
        ask_what_is_due(&targets[i]);
    while (next_arrival_ns <= now) {
        struct target *target = &targets[next_target++ % target_count];
        if (measuring)
            arrivals++;
        if (target->due_length || !ask_idle(target, next_arrival_ns))
            queue_due(target, next_arrival_ns);
        next_arrival_ns += (uint64_t)(-log(1.0 - drand48()) / rate_of_all * (double)SECOND_NS);
    }
}

/* ---- The processes that are watched ---- */

static int processes[PROCESSES_MAX];
static int process_count;

/* CPU seconds of all threads, ended ones too, to the nanosecond (/proc/PID/stat knows hundredths only). */
static double cpu_seconds(void)
{
    double sum = 0;
    for (int i = 0; i < process_count; i++) {
        clockid_t clock;
        struct timespec time;
        if (!clock_getcpuclockid(processes[i], &clock) && !clock_gettime(clock, &time))
            sum += (double)time.tv_sec + (double)time.tv_nsec / 1e9;
    }
    return sum;
}

static long resident_kb(void)
{
    long sum = 0;
    for (int i = 0; i < process_count; i++) {
        char path[64];
        long size, resident;
        snprintf(path, sizeof path, "/proc/%d/statm", processes[i]);
        FILE *file = fopen(path, "r");
        if (!file)
            continue;
        if (fscanf(file, "%ld %ld", &size, &resident) == 2)
            sum += resident * (sysconf(_SC_PAGESIZE) / 1024);
        fclose(file);
    }
    return sum;
}

static double own_cpu_seconds(void)
{
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* ---- Options ---- */

struct options {
    int connections;
    double seconds, warmup, ramp;
    double rate;
    const char *path, *key;
    int prompt_bytes;
};

static void add_target(char *name_and_port)
{
    char *colon = strchr(name_and_port, ':');
    if (!colon || target_count == TARGETS_MAX) {
        fprintf(stderr, "loadgen: --target wants NAME:PORT, at most %d times\n", TARGETS_MAX);
        exit(2);
    }
    *colon = '\0';
    struct target *target = &targets[target_count++];
    target->name = name_and_port;
    target->address = (struct sockaddr_in){.sin_family = AF_INET,
                                           .sin_port = htons((uint16_t)atoi(colon + 1)),
                                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
}

static void add_processes(char *list)
{
    for (char *next = strtok(list, ","); next && process_count < PROCESSES_MAX; next = strtok(NULL, ","))
        processes[process_count++] = atoi(next);
}

static struct options read_options(int count, char **arguments)
{
    static const struct option names[] = {
        {"target", required_argument, 0, 't'},  {"connections", required_argument, 0, 'c'}, {"seconds", required_argument, 0, 's'},
        {"warmup", required_argument, 0, 'w'},  {"ramp", required_argument, 0, 'm'},        {"rate", required_argument, 0, 'r'},
        {"chunks", required_argument, 0, 'n'},  {"path", required_argument, 0, 'p'},        {"prompt-bytes", required_argument, 0, 'b'},
        {"key", required_argument, 0, 'k'},     {"cpu-of", required_argument, 0, 'u'},
        {"choices", required_argument, 0, 'o'}, {0, 0, 0, 0}};
    struct options options = {.connections = 64, .seconds = 4, .warmup = 1, .path = "/v1/chat/completions", .key = "sk-bench",
                              .prompt_bytes = 800};
    for (int option; (option = getopt_long(count, arguments, "", names, NULL)) != -1;) {
        switch (option) {
        case 't': add_target(optarg); break;
        case 'c': options.connections = atoi(optarg); break;
        case 's': options.seconds = atof(optarg); break;
        case 'w': options.warmup = atof(optarg); break;
        case 'm': options.ramp = atof(optarg); break;
        case 'r': options.rate = atof(optarg); is_open_loop = true; break;
        case 'n': chunks_wanted = atol(optarg); break;
        case 'p': options.path = optarg; break;
        case 'b': options.prompt_bytes = atoi(optarg); break;
        case 'k': options.key = optarg; break;
        case 'u': add_processes(optarg); break;
        case 'o': choices = atol(optarg); break;
        default: exit(2);
        }
    }
    if (!target_count || options.connections <= 0 || options.prompt_bytes < 0 || (is_open_loop && options.rate <= 0)) {
        fprintf(stderr, "usage: loadgen --target NAME:PORT [--target ...] [options]; see the head of loadgen.c\n");
        exit(2);
    }
    return options;
}

static char *make_prompt(int bytes)
{
    char *prompt = malloc((size_t)bytes + 1);
    if (!prompt)
        die("out of memory");
    for (int i = 0; i < bytes; i++)
        prompt[i] = i % 6 == 5 ? ' ' : (char)('a' + i * 11 % 26);
    prompt[bytes] = '\0';
    return prompt;
}

static void make_request(struct target *target, const struct options *options)
{
    bool is_chat = strstr(options->path, "/chat/") != NULL;
    char *prompt = make_prompt(options->prompt_bytes), *body;
    long max_tokens = chunks_wanted ? chunks_wanted : 32;
    const char *stream = chunks_wanted ? "true" : "false";
    const char *format = is_chat
        ? "{\"model\":\"mock\",\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"},"
          "{\"role\":\"user\",\"content\":\"%s\"}],\"temperature\":0.7,\"max_tokens\":%ld,\"stream\":%s%s}"
        : "{\"model\":\"mock\",\"prompt\":\"%s\",\"temperature\":0.7,\"max_tokens\":%ld,\"stream\":%s%s}";
    char several[32] = "";
    if (choices > 1)
        snprintf(several, sizeof several, ",\"n\":%ld", choices);
    if (asprintf(&body, format, prompt, max_tokens, stream, several) < 0)
        die("out of memory");
    int length = asprintf(&target->request,
                          "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nUser-Agent: loadgen\r\nAccept: */*\r\n"
                          "Content-Type: application/json\r\nAuthorization: Bearer %s\r\nContent-Length: %zu\r\n\r\n%s",
                          options->path, ntohs(target->address.sin_port), options->key, strlen(body), body);
    if (length < 0)
        die("out of memory");
    target->request_length = (size_t)length;
    free(prompt);
    free(body);
}

/* ---- The run ---- */

static struct connection *connections;
static int connections_total, connections_opened;

static void connected(struct connection *connection, uint32_t events)
{
    if (events & (EPOLLERR | EPOLLHUP)) {
        connection->target->connect_errors++;
        usleep(1000);
        reopen_connection(connection);
        return;
    }
    if (!(events & EPOLLOUT))
        return;
    connection->connecting = false;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, connection->fd, &event);
    if (connection->busy)
        send_request(connection);
}

static void open_due_connections(uint64_t now, uint64_t start_ns, double ramp)
{
    for (int opened = 0; connections_opened < connections_total && opened < 64; opened++) {
        if (now < start_ns + (uint64_t)(ramp * (double)SECOND_NS * connections_opened / connections_total))
            return;
        struct connection *connection = &connections[connections_opened];
        connection->target = &targets[connections_opened % target_count];
        connections_opened++;
        open_connection(connection);
        become_free(connection);
    }
}

static void turn(uint64_t now)
{
    struct epoll_event events[EVENTS_MAX];
    long wait_ns = connections_opened < connections_total ? 200000 : 20000000;
    if (is_open_loop) {
        long next = next_arrival_ns > now ? (long)(next_arrival_ns - now) : 0;
        wait_ns = next < wait_ns ? next : wait_ns;
    }
    struct timespec wait = {0, wait_ns};
    int count = epoll_pwait2(epoll_fd, events, EVENTS_MAX, &wait, NULL);
    for (int i = 0; i < count; i++) {
        struct connection *connection = events[i].data.ptr;
        if (connection->connecting)
            connected(connection, events[i].events);
        else
            receive(connection);
    }
}

static int streams_open(void)
{
    int open = 0;
    for (int i = 0; i < connections_opened; i++)
        open += connections[i].busy && connections[i].body_state != IN_HEAD && connections[i].status == 200;
    return open;
}

static void print_target(struct target *target, double elapsed)
{
    printf("\"%s\":{\"answers\":%lu,\"per_second\":%.1f,\"refused\":%lu,\"broken\":%lu,\"short_streams\":%lu,\"connect_errors\":%lu,"
           "\"chunks\":%lu,\"chunks_per_second\":%.1f",
           target->name, target->answers, (double)target->answers / elapsed, target->refused, target->broken, target->short_streams,
           target->connect_errors, target->chunks, (double)target->chunks / elapsed);
    print_series("latency_us", &target->latency);
    print_series("first_chunk_us", &target->first_chunk);
    print_series("transit_us", &target->transit);
    printf("}");
}

int main(int count, char **arguments)
{
    struct options options = read_options(count, arguments);
    for (int i = 0; i < target_count; i++) {
        make_request(&targets[i], &options);
        targets[i].due_ns = calloc(DUE_MAX, sizeof *targets[i].due_ns);
        if (!targets[i].due_ns)
            die("out of memory");
    }
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1000ul); /* arrivals within a microsecond of their time, not fifty */
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    connections_total = options.connections * target_count;
    connections = calloc((size_t)connections_total, sizeof *connections);
    if (!connections)
        die("out of memory");

    uint64_t start_ns = now_ns();
    uint64_t measure_ns = start_ns + (uint64_t)((options.ramp + options.warmup) * (double)SECOND_NS);
    uint64_t end_ns = measure_ns + (uint64_t)(options.seconds * (double)SECOND_NS);
    uint64_t measured_from_ns = 0;
    double cpu_before = 0, own_cpu_before = 0;
    long resident_before_kb = resident_kb();
    next_arrival_ns = start_ns + (uint64_t)((options.ramp + options.warmup / 2) * (double)SECOND_NS);

    for (uint64_t now = start_ns; now < end_ns; now = now_ns()) {
        if (!measuring && now >= measure_ns) {
            measuring = true;
            cpu_before = cpu_seconds();
            own_cpu_before = own_cpu_seconds();
            measured_from_ns = now_ns();
        }
        open_due_connections(now, start_ns, options.ramp);
        if (is_open_loop)
            start_arrivals(now, options.rate * target_count);
        turn(now);
    }

    double elapsed = (double)(now_ns() - measured_from_ns) / (double)SECOND_NS;
    double cpu = cpu_seconds() - cpu_before;
    double own_cpu = own_cpu_seconds() - own_cpu_before;
    printf("{\"seconds\":%.3f,\"cpu_seconds\":%.6f,\"generator_cpu\":%.3f,\"resident_kb_before\":%ld,\"resident_kb\":%ld,"
           "\"streams_open\":%d,\"arrivals\":%lu,\"arrivals_late\":%lu,\"arrivals_lost\":%lu,\"targets\":{",
           elapsed, cpu, own_cpu / elapsed, resident_before_kb, resident_kb(), streams_open(), arrivals, arrivals_late, arrivals_lost);
    for (int i = 0; i < target_count; i++) {
        if (i)
            printf(",");
        print_target(&targets[i], elapsed);
    }
    printf("}}\n");
    return 0;
}
