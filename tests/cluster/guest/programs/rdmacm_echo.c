// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * Server and client that exchange a word as private data of a connection, and print each event with
 * its private data. The program uses librdmacm alone, and reads events when the descriptor of its
 * channel is readable.
 *
 * rdmacm_echo
 *	server: accepts connections, and returns the received word; rejects the word "no" with
 *	"sorry"; disconnects at once after "late"; returns the address of the client for "forged"
 * rdmacm_echo ADDRESS WORD
 *	client: connects and disconnects; with the word "wait" waits until the peer disconnects;
 *	with "late" reads no event before SIGUSR1; with "forged" claims the address 192.0.2.1
 */

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PORT 7777
#define TIMEOUT_MS 60000

static struct rdma_event_channel *channel;

/* SIGUSR1, before which the client reads no event with the word "late". */
static sigset_t late_signal;

static void check(int condition, const char *operation)
{
	if (condition)
		return;
	perror(operation);
	exit(1);
}

/* Returns the private data of an event as a string. */
static const char *private_data(const struct rdma_cm_event *event)
{
	static char data[256];
	const struct rdma_conn_param *conn = &event->param.conn;

	memset(data, 0, sizeof(data));
	if (event->event != RDMA_CM_EVENT_ADDR_RESOLVED && conn->private_data)
		memcpy(data, conn->private_data, conn->private_data_len);
	return data;
}

/* Waits for the next event, and prints it. */
static struct rdma_cm_event *next_event(void)
{
	struct pollfd readable = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;

	check(poll(&readable, 1, TIMEOUT_MS) == 1, "poll");
	check(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
	printf("%s %d %s\n", rdma_event_str(event->event) + strlen("RDMA_CM_EVENT_"),
	       event->status, private_data(event));
	fflush(stdout);
	return event;
}

static void create_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 2, .max_recv_sge = 2 },
		.qp_type = IBV_QPT_RC,
	};

	check(!rdma_create_qp(id, NULL, &attr), "rdma_create_qp");
}

static struct rdma_conn_param conn_param(const char *word)
{
	return (struct rdma_conn_param){ .private_data = word, .private_data_len = strlen(word) };
}

static struct in_addr *ipv4(struct sockaddr *address)
{
	return &((struct sockaddr_in *)address)->sin_addr;
}

static void reply_to_request(struct rdma_cm_id *id, const char *word)
{
	int is_forged = !strcmp(word, "forged");
	struct rdma_conn_param param =
		conn_param(is_forged ? inet_ntoa(*ipv4(rdma_get_peer_addr(id))) : word);

	if (!strcmp(word, "no")) {
		check(!rdma_reject(id, "sorry", strlen("sorry")), "rdma_reject");
		check(!rdma_destroy_id(id), "rdma_destroy_id");
		return;
	}
	create_qp(id);
	check(!rdma_accept(id, &param), "rdma_accept");
	if (!strcmp(word, "late"))
		check(!rdma_disconnect(id), "rdma_disconnect");
}

static void destroy(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	check(!rdma_destroy_id(id), "rdma_destroy_id");
}

/*
 * Listens on a channel of its own until the first request arrives. Then migrates the listener, with
 * the event, to the main channel.
 */
static void listen_and_migrate(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	struct rdma_event_channel *first = rdma_create_event_channel();
	struct pollfd readable = { .fd = first->fd, .events = POLLIN };
	struct rdma_cm_id *listener;

	check(!rdma_create_id(first, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(!rdma_bind_addr(listener, (void *)&any) && !rdma_listen(listener, 8), "rdma_listen");
	puts("listening");
	fflush(stdout);
	check(poll(&readable, 1, TIMEOUT_MS) == 1, "poll for the first request");
	check(!rdma_migrate_id(listener, channel), "rdma_migrate_id");
	rdma_destroy_event_channel(first);
}

static void run_server(void)
{
	struct rdma_cm_id *id;
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;

	listen_and_migrate();
	while (1) {
		event = next_event();
		type = event->event;
		id = event->id;
		if (type == RDMA_CM_EVENT_CONNECT_REQUEST)
			reply_to_request(id, private_data(event));
		rdma_ack_cm_event(event);
		if (type == RDMA_CM_EVENT_TIMEWAIT_EXIT)
			destroy(id);
	}
}

static void expect(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event = next_event();
	int is_expected = event->event == type;

	rdma_ack_cm_event(event);
	/* next_event() has printed the unexpected event. */
	if (!is_expected)
		exit(2);
}

/* A second disconnect must succeed, by the server and by the client. */
static void disconnect(struct rdma_cm_id *id)
{
	check(!rdma_disconnect(id) && !rdma_disconnect(id), "rdma_disconnect");
}

static void run_client(const char *address, const char *word)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	struct rdma_conn_param param = conn_param(word);
	struct rdma_cm_id *id;
	int signal;

	to.sin_addr.s_addr = inet_addr(address);
	check(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(!rdma_migrate_id(id, channel), "rdma_migrate_id to the same channel");
	check(!rdma_resolve_addr(id, NULL, (void *)&to, TIMEOUT_MS), "rdma_resolve_addr");
	expect(RDMA_CM_EVENT_ADDR_RESOLVED);
	check(!rdma_resolve_route(id, TIMEOUT_MS), "rdma_resolve_route");
	expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
	check(rdma_disconnect(id) < 0, "rdma_disconnect before rdma_connect succeeded");
	create_qp(id);
	if (!strcmp(word, "forged"))
		ipv4(rdma_get_local_addr(id))->s_addr = inet_addr("192.0.2.1");
	check(!rdma_connect(id, &param), "rdma_connect");
	if (!strcmp(word, "late"))
		check(!sigwait(&late_signal, &signal), "sigwait");
	expect(RDMA_CM_EVENT_ESTABLISHED);
	if (strcmp(word, "wait"))
		disconnect(id);
	expect(RDMA_CM_EVENT_DISCONNECTED);
	expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
	disconnect(id);
	destroy(id);
}

static void *wait_for_event(void *channel_of_thread)
{
	struct rdma_cm_event *event;

	rdma_get_cm_event(channel_of_thread, &event);
	return NULL;
}

/* A thread that waits for an event can be cancelled. */
static void cancel_waiting_thread(void)
{
	struct rdma_event_channel *quiet = rdma_create_event_channel();
	pthread_t thread;
	void *result;

	check(!pthread_create(&thread, NULL, wait_for_event, quiet), "pthread_create");
	check(!pthread_cancel(thread) && !pthread_join(thread, &result), "pthread_cancel");
	check(result == PTHREAD_CANCELED, "rdma_get_cm_event on an unused channel");
	rdma_destroy_event_channel(quiet);
}

int main(int argc, char **argv)
{
	struct rdma_cm_event *none;

	sigemptyset(&late_signal);
	sigaddset(&late_signal, SIGUSR1);
	check(!sigprocmask(SIG_BLOCK, &late_signal, NULL), "sigprocmask");
	channel = rdma_create_event_channel();
	check(!!channel, "rdma_create_event_channel");
	check(!fcntl(channel->fd, F_SETFL, O_NONBLOCK), "fcntl");
	check(rdma_get_cm_event(channel, &none) < 0, "rdma_get_cm_event without an event");
	rdma_freeaddrinfo(NULL);
	cancel_waiting_thread();
	if (argc == 3)
		run_client(argv[1], argv[2]);
	else
		run_server();
	rdma_destroy_event_channel(channel);
	return 0;
}
