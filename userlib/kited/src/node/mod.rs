// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Node of the cluster, as the daemon runs it: passes messages of peers, events of the kernel and clock ticks to the
//! membership state machine, and performs its actions.

mod frozen;
mod startup;
mod storage;

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, ensure, Context, Error, Result};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{self, Receiver, Sender, UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio::time::{interval, timeout, MissedTickBehavior};

use crate::checkpoint::Checkpoint;
use crate::control::ControlSocket;
use crate::kernel::{Kernel, KernelEvent};
use crate::key::Key;
use crate::links::{LinkEvent, Links};
use crate::membership::{Action, Input, LinkId, MachineClock, MembershipMachine, Outbox, Timing};
use crate::protocol::{Instance, Message};
use crate::state_file::StateLocation;
use crate::store::{self, CoordinatorConfig, StoreConfig};
use crate::worker::{self, CommandQueue, KernelCommand, KernelReport, ProberSlot};
use frozen::FrozenFile;
use startup::{load_snapshot, new_machine, open_kernel, OpenedKernel};
use storage::Storage;

/// Maximum time to send goodbyes.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

/// Role of a daemon in its cluster.
#[derive(Debug)]
pub enum Role {
    /// Creates a cluster, which other nodes join through this socket.
    Seed(TcpListener),
    /// Joins the cluster of one of these seeds, each HOST:PORT.
    Follower(Vec<String>),
    /// Joins the cluster of this store, and is a candidate for its coordinator.
    Store(StoreConfig),
}

/// Configuration of a daemon.
#[derive(Debug)]
pub struct Config {
    /// Seed or follower.
    pub role: Role,
    /// Key of the cluster. Without a key, peers are not authenticated.
    pub key: Option<Key>,
    /// Timing, the same on all nodes.
    pub timing: Timing,
    /// Storage that outlives the process. Without it, the membership of the node ends with the process.
    pub checkpoint: Option<Checkpoint>,
    /// State file of a seed. Without it, a seed that starts a new incarnation takes the state from its members.
    pub state: Option<StateLocation>,
    /// Time after which the coordinator evicts an unreachable member. Without it, unreachable members stay.
    pub forget_after: Option<Duration>,
    /// Directory of the control socket and of the file that shows a frozen membership. Without it, no operator of this
    /// host can evict a node.
    pub control_directory: Option<PathBuf>,
}

/// Action of a daemon when its process is requested to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Keeps the node in the cluster, so that another process can continue its membership. Without a
    /// [`checkpoint`](Config::checkpoint) the node leaves.
    Detach,
    /// Leaves the cluster.
    Leave,
}

/// Runs a daemon until `shutdown` resolves. Calls `on_ready` with the number of this node and the number of members
/// when the kernel has applied the first view of an incarnation, or of this process.
///
/// # Errors
/// If the kernel or the cluster rejects the node, for example because of a missing key, or if the task of the
/// connections ends.
pub async fn run(
    mut config: Config,
    kernel: impl Kernel,
    mut on_ready: impl FnMut(u32, usize),
    shutdown: impl Future<Output = Shutdown>,
) -> Result<()> {
    let (kernel_events_in, kernel_events) = mpsc::unbounded_channel();
    let saved = load_snapshot(&mut config);
    let is_seed = matches!(config.role, Role::Seed(_));
    let location = config.state.take().filter(|_| is_seed);
    let open = move || open_kernel(kernel, saved, location, kernel_events_in);
    let opened = tokio::task::spawn_blocking(open).await??;
    let (mut node, mut sources) = DaemonNode::start(config, opened, kernel_events)?;
    let result = node.run_loop(&mut sources, &mut on_ready, shutdown).await;
    node.finish(sources).await?;
    result
}

/// Sources of inputs for the state machine.
struct InputSources {
    events: Receiver<LinkEvent>,
    reports: UnboundedReceiver<KernelReport>,
    kernel_events: UnboundedReceiver<KernelEvent>,
    control: ControlSocket,
    tick: Duration,
    worker: JoinHandle<()>,
}

/// State machine, and the targets of its actions.
struct DaemonNode {
    machine: Box<dyn MembershipMachine>,
    clock: MachineClock,
    storage: Storage,
    /// Actions that wait until the state is saved.
    outbox: Outbox,
    links: HashMap<LinkId, Sender<Message>>,
    commands: CommandSender,
    prober: ProberSlot,
    probe_timeout: Duration,
    /// Probes that have not ended.
    probes: BTreeSet<Instance>,
    reports: UnboundedSender<KernelReport>,
    frozen: FrozenFile,
    /// Task that establishes connections. It is aborted on drop.
    connector: JoinSet<()>,
}

/// Sender of commands for the kernel thread, which ends when the sender is dropped.
struct CommandSender(Arc<CommandQueue>);

impl Drop for CommandSender {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl DaemonNode {
    fn start(
        config: Config,
        mut opened: OpenedKernel<impl Kernel>,
        kernel_events: UnboundedReceiver<KernelEvent>,
    ) -> Result<(Self, InputSources)> {
        let (machine, membership) = new_machine(&config, &mut opened)?;
        let control = bind_control(&config, &opened.kernel);
        let frozen = create_frozen_file(&config, &opened.kernel);
        let timing = config.timing;
        let (events_in, events) = mpsc::channel(1024);
        let (reports_in, reports) = mpsc::unbounded_channel();
        let commands = Arc::new(CommandQueue::default());
        let prober = ProberSlot::default();
        let links = Links::new(config.key, timing.dead_after, events_in);
        let mut connector = JoinSet::new();
        match config.role {
            Role::Seed(listener) => connector.spawn(links.listen(listener)),
            Role::Follower(seeds) => connector.spawn(links.dial(seeds, timing.heartbeat_interval)),
            Role::Store(store) => {
                let coordinator = CoordinatorConfig {
                    timing,
                    wire_version: opened.info.wire_version,
                    forget_after: config.forget_after,
                };
                connector.spawn(connect_store(store, coordinator, links))
            }
        };
        let storage = Storage::new(config.checkpoint, opened.state_file.take());
        let (for_worker, to_node) = ((Arc::clone(&commands), prober.clone()), reports_in.clone());
        let worker = tokio::task::spawn_blocking(move || {
            let OpenedKernel { kernel, events, .. } = opened;
            worker::run_worker(kernel, membership, for_worker, to_node, events);
        });
        let node = Self {
            machine,
            clock: MachineClock::new(&timing, Instant::now()),
            storage,
            outbox: Outbox::default(),
            links: HashMap::new(),
            commands: CommandSender(commands),
            prober,
            probe_timeout: timing.probe_timeout(),
            probes: BTreeSet::new(),
            reports: reports_in,
            frozen,
            connector,
        };
        let sources = InputSources {
            events,
            reports,
            kernel_events,
            control,
            tick: timing.heartbeat_interval / 2,
            worker,
        };
        Ok((node, sources))
    }

    async fn run_loop(
        &mut self,
        sources: &mut InputSources,
        on_ready: &mut impl FnMut(u32, usize),
        shutdown: impl Future<Output = Shutdown>,
    ) -> Result<()> {
        let mut clock = interval(sources.tick);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tokio::pin!(shutdown);
        self.step(Input::Start)?;
        loop {
            // Messages precede the clock: after a pause of this process, messages that arrived in time still count.
            let input = tokio::select! {
                biased;
                shutdown = &mut shutdown => return self.shut_down(shutdown),
                Some(report) = sources.reports.recv() => self.report_to_input(report, on_ready)?,
                Some(event) = sources.events.recv() => match self.link_event_to_input(event)? {
                    Some(input) => input,
                    None => continue,
                },
                Some(event) = sources.kernel_events.recv() => match event {
                    KernelEvent::Suspect(node) => Input::Suspect(node),
                    KernelEvent::RnicRemoved(error) => {
                        self.leave()?;
                        return Err(error.context("RNIC removed"));
                    }
                },
                // The last event of a connector that gives up is its reason, so events precede its end.
                Some(ended) = self.connector.join_next() => {
                    // The connections do not come back, but the next process continues the membership.
                    self.shut_down(Shutdown::Detach)?;
                    return Err(connector_error(ended));
                }
                instance = sources.control.next_eviction() => Input::Evict(instance),
                _ = clock.tick() => Input::Tick,
            };
            self.step(input)?;
        }
    }

    fn report_to_input(
        &mut self,
        report: KernelReport,
        on_ready: &mut impl FnMut(u32, usize),
    ) -> Result<Input> {
        Ok(match report {
            KernelReport::Failed(error) => {
                self.leave()?;
                return Err(error);
            }
            KernelReport::Applied { epoch, first } => {
                let first = first.into_iter();
                first.for_each(|(node, members)| on_ready(node, members));
                Input::Applied(epoch)
            }
            KernelReport::Probed(instance, result) => {
                self.probes.remove(&instance);
                Input::Probed(instance, result)
            }
        })
    }

    /// Returns the input of an event, or `None` if the event is not for the state machine.
    fn link_event_to_input(&mut self, event: LinkEvent) -> Result<Option<Input>> {
        self.frozen.on_event(&event);
        Ok(Some(match event {
            LinkEvent::Opened(link, host, sender) => {
                self.links.insert(link, sender);
                Input::Opened(link, host)
            }
            LinkEvent::Message(link, message) => Input::Message(link, message),
            LinkEvent::Closed(link) => {
                self.links.remove(&link);
                Input::Closed(link)
            }
            LinkEvent::Unavailable(_) => return Ok(None),
            LinkEvent::Failed(error) => return Err(error).context("cannot join the cluster"),
        }))
    }

    fn shut_down(&mut self, shutdown: Shutdown) -> Result<()> {
        match shutdown {
            Shutdown::Detach if self.storage.has_checkpoint() => {
                self.send_command(KernelCommand::Detach)
            }
            _ => self.leave(),
        }
    }

    /// Leaves the cluster. The state is saved before the goodbyes are sent: no later process may continue this
    /// incarnation. The node leaves even if that fails.
    fn leave(&mut self) -> Result<()> {
        let mut actions = Vec::new();
        let (now, _) = self.clock.read(Instant::now());
        self.machine.step(now, Input::Leave, &mut actions);
        self.storage.save(self.machine.snapshot().as_ref());
        self.perform_all(actions)
    }

    fn step(&mut self, input: Input) -> Result<()> {
        let (now, pause) = self.clock.read(Instant::now());
        if let Some(pause) = pause {
            tracing::warn!("process did not run for {pause:?}: timeouts extended");
        }
        let is_tick = matches!(input, Input::Tick);
        let mut actions = Vec::new();
        self.machine.step(now, input, &mut actions);
        let save = || self.storage.save(self.machine.snapshot().as_ref());
        let ready = self.outbox.submit(actions, is_tick, save);
        self.perform_all(ready)
    }

    fn perform_all(&mut self, actions: Vec<Action>) -> Result<()> {
        actions
            .into_iter()
            .try_for_each(|action| self.perform(action))
    }

    fn perform(&mut self, action: Action) -> Result<()> {
        let command = match action {
            Action::Send(link, message) => {
                let full = |sender: &Sender<Message>| sender.try_send(message).is_err();
                if self.links.get(&link).is_some_and(full) {
                    // The peer does not read its messages. It may connect again later.
                    self.links.remove(&link);
                }
                return Ok(());
            }
            Action::Close(link) => {
                self.links.remove(&link);
                return Ok(());
            }
            Action::Probe(instance) => {
                // One probe serves all requests for its result.
                if self.probes.insert(instance) {
                    let reports = self.reports.clone();
                    self.prober.probe(instance, self.probe_timeout, reports);
                }
                return Ok(());
            }
            Action::Fail(reason) => bail!("cluster rejects this node: {reason}"),
            Action::Join(identity) => KernelCommand::Join(identity),
            Action::Leave => KernelCommand::Leave,
            Action::PublishHosts(hosts) => KernelCommand::PublishHosts(hosts),
            Action::ApplyView(view) => {
                let members: Vec<u32> = view.members.iter().map(|m| m.node).collect();
                let unreachable = view.members.iter().filter(|m| !m.is_reachable());
                let unreachable: Vec<u32> = unreachable.map(|m| m.node).collect();
                tracing::info!(epoch = view.epoch, ?members, ?unreachable, "new view");
                KernelCommand::ApplyView(view)
            }
        };
        self.send_command(command)
    }

    fn send_command(&self, command: KernelCommand) -> Result<()> {
        ensure!(self.commands.0.push(command), "kernel thread has exited");
        Ok(())
    }

    /// Sends pending goodbyes and leaves the cluster.
    async fn finish(self, mut sources: InputSources) -> Result<()> {
        let Self {
            links,
            commands,
            connector,
            ..
        } = self;
        drop((connector, links, commands));
        // Each connection holds a sender of events until it is closed.
        let all_closed = async { while sources.events.recv().await.is_some() {} };
        let _ = timeout(GOODBYE_TIMEOUT, all_closed).await;
        sources.worker.await.context("kernel thread failed")
    }
}

/// Creates the control socket. A follower of a seed has none.
fn bind_control(config: &Config, kernel: &impl Kernel) -> ControlSocket {
    match (&config.role, &config.control_directory) {
        (Role::Follower(_), _) | (_, None) => ControlSocket::default(),
        (_, Some(directory)) => ControlSocket::bind(directory, &kernel.rnic_name()),
    }
}

/// Creates the file that shows a frozen membership. A seed has none.
fn create_frozen_file(config: &Config, kernel: &impl Kernel) -> FrozenFile {
    match (&config.role, &config.control_directory) {
        (_, None) => FrozenFile::default(),
        (Role::Seed(_), Some(directory)) => FrozenFile::remove(directory, &kernel.rnic_name()),
        (_, Some(directory)) => FrozenFile::create(directory, &kernel.rnic_name()),
    }
}

/// Connects the daemon with a store until the task is aborted. The connection itself is a task of its own, so that a
/// goodbye is still sent then. Ends if that task ends.
async fn connect_store(store: StoreConfig, coordinator: CoordinatorConfig, links: Links) {
    let (_guard, stop) = oneshot::channel();
    let Links { key, events, .. } = links;
    join_detached(tokio::spawn(store::run(
        store,
        key,
        coordinator,
        events,
        stop,
    )))
    .await;
}

/// Waits for the end of a task, which continues if this function is aborted. Panics if the task panics.
async fn join_detached(task: JoinHandle<()>) {
    if let Err(Ok(panic)) = task.await.map_err(JoinError::try_into_panic) {
        std::panic::resume_unwind(panic);
    }
}

/// Returns the error of a daemon whose connector has ended.
fn connector_error(ended: Result<(), JoinError>) -> Error {
    match ended {
        Ok(()) => anyhow!("task of the connections ended"),
        Err(error) => Error::new(error).context("task of the connections failed"),
    }
}

#[cfg(test)]
mod tests;
