// SPDX-License-Identifier: GPL-2.0 OR MIT
//! Node of the cluster, as the daemon runs it: passes messages of peers, events of the kernel and clock ticks to the
//! membership state machine, and performs its actions.

use std::collections::HashMap;
use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use kite::Member;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{self, Receiver, Sender, UnboundedReceiver, UnboundedSender};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{interval, timeout, MissedTickBehavior};

use crate::kernel::{Kernel, KernelEvent};
use crate::key::Key;
use crate::links::{LinkEvent, Links};
use crate::membership::{
    needs_snapshot, Action, Follower, Input, LinkId, MembershipMachine, Seed, SeedSnapshot,
    Snapshot, Timing,
};
use crate::probes::Probes;
use crate::protocol::{Message, View};
use crate::storage::checkpoint::Checkpoint;
use crate::storage::state_file::StateFile;
use crate::worker::{self, KernelCommand, KernelReport, Membership};

/// Maximum interval between attempts to connect to the seeds.
const DIAL_INTERVAL_MAX: Duration = Duration::from_millis(500);

/// Maximum time to send goodbyes.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

/// Role of a daemon in its cluster.
#[derive(Debug)]
pub enum Role {
    /// Creates a cluster, which other nodes join through this socket.
    Seed(TcpListener),
    /// Joins the cluster of one of these seeds, each HOST:PORT.
    Follower(Vec<String>),
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
    /// File of the seed, which outlives its host's restarts. Without it, a restarted seed recovers the cluster from the
    /// members that connect first.
    pub state_file: Option<StateFile>,
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
/// If the kernel or the cluster rejects the node, for example because of a missing key.
pub async fn run(
    mut config: Config,
    kernel: impl Kernel,
    mut on_ready: impl FnMut(u32, usize),
    shutdown: impl Future<Output = Shutdown>,
) -> Result<()> {
    let (kernel_events_in, kernel_events) = mpsc::unbounded_channel();
    let saved = load_snapshot(&mut config);
    let former = match (&config.role, &config.state_file) {
        (Role::Seed(_), Some(file)) => file.load()?,
        _ => None,
    };
    let open = move || open_kernel(kernel, saved, kernel_events_in);
    let opened = tokio::task::spawn_blocking(open).await??;
    let (mut node, mut sources) = DaemonNode::start(config, opened, former, kernel_events)?;
    let result = node.run_loop(&mut sources, &mut on_ready, shutdown).await;
    node.finish(sources).await?;
    result
}

/// Loads the snapshot of a previous process, if it fits the role of this process.
fn load_snapshot(config: &mut Config) -> Option<Snapshot> {
    let loaded = config.checkpoint.as_mut()?.load();
    let loaded = loaded.unwrap_or_else(|error| {
        tracing::warn!("{error:#}: starting a new incarnation");
        None
    });
    let is_of_role = |snapshot: &Snapshot| {
        matches!(
            (&config.role, snapshot),
            (Role::Seed(_), Snapshot::Seed(_)) | (Role::Follower(_), Snapshot::Follower(_))
        )
    };
    loaded.filter(is_of_role)
}

/// Kernel, and the state that a previous process left.
struct OpenedKernel<K> {
    kernel: K,
    events: UnboundedSender<KernelEvent>,
    address: kite::FabricAddress,
    prior: Option<(Snapshot, Membership)>,
}

/// Opens the kernel, and resumes the incarnation of a snapshot if the kernel still has it. Blocks.
fn open_kernel<K: Kernel>(
    mut kernel: K,
    saved: Option<Snapshot>,
    events: UnboundedSender<KernelEvent>,
) -> Result<OpenedKernel<K>> {
    let incarnation = saved.as_ref().map(Snapshot::incarnation);
    let resumed = kernel.resume(incarnation, events.clone())?;
    let mut prior = None;
    if let (Some(snapshot), Some(resumed)) = (saved, resumed) {
        if resumed.epoch <= snapshot.epoch() {
            tracing::info!(
                node = snapshot.node(),
                epoch = resumed.epoch,
                "membership resumed"
            );
            let membership = Membership::new(snapshot.node(), resumed.session, resumed.epoch);
            prior = Some((snapshot, membership));
        } else {
            tracing::warn!(
                "checkpoint is older than the kernel's view: starting a new incarnation"
            );
            resumed.session.leave();
        }
    }
    let address = kernel.address()?;
    Ok(OpenedKernel {
        kernel,
        events,
        address,
        prior,
    })
}

/// Creates the state machine. `snapshot` is the state of an incarnation that continues, `former` that of a previous
/// incarnation of the seed.
fn new_machine(
    config: &Config,
    address: kite::FabricAddress,
    snapshot: Option<Snapshot>,
    former: Option<SeedSnapshot>,
) -> Result<Box<dyn MembershipMachine>> {
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).context("cannot read random bytes")?;
    let incarnation = getrandom::u64().context("cannot read random bytes")?.max(1);
    let timing = config.timing;
    Ok(match (&config.role, snapshot) {
        (_, Some(Snapshot::Seed(seed))) => Box::new(Seed::resume(timing, seed)),
        (_, Some(Snapshot::Follower(follower))) => {
            Box::new(Follower::resume(timing, address, follower))
        }
        (Role::Seed(_), None) => match former {
            Some(former) => Box::new(Seed::restart(timing, address, incarnation, former)),
            None => Box::new(Seed::new(timing, address, incarnation, secret)),
        },
        (Role::Follower(_), None) => Box::new(Follower::new(timing, address, incarnation)),
    })
}

/// Sources of inputs for the state machine.
struct InputSources {
    events: Receiver<LinkEvent>,
    reports: UnboundedReceiver<KernelReport>,
    kernel_events: UnboundedReceiver<KernelEvent>,
    tick: Duration,
    worker: JoinHandle<()>,
}

/// State machine, and the targets of its actions.
struct DaemonNode {
    machine: Box<dyn MembershipMachine>,
    checkpoint: Option<Checkpoint>,
    state_file: Option<StateFile>,
    /// The last state could not be saved. Logged once.
    is_unsaved: bool,
    probes: Probes,
    rdma_timeout: Duration,
    kernel_events: UnboundedSender<KernelEvent>,
    links: HashMap<LinkId, Sender<Message>>,
    commands: UnboundedSender<KernelCommand>,
    /// Task that establishes connections. It is aborted on drop.
    connector: JoinSet<()>,
}

impl DaemonNode {
    fn start(
        config: Config,
        opened: OpenedKernel<impl Kernel>,
        former: Option<SeedSnapshot>,
        kernel_events: UnboundedReceiver<KernelEvent>,
    ) -> Result<(Self, InputSources)> {
        let (snapshot, membership) = opened.prior.unzip();
        let machine = new_machine(&config, opened.address, snapshot, former)?;
        let Timing {
            heartbeat_interval: heartbeat,
            dead_after: dead,
        } = config.timing;
        let (events_in, events) = mpsc::channel(1024);
        let (reports_in, reports) = mpsc::unbounded_channel();
        let (commands, commands_out) = mpsc::unbounded_channel();
        let links = Links::new(config.key, dead, events_in);
        let mut connector = JoinSet::new();
        match config.role {
            Role::Seed(listener) => connector.spawn(links.listen(listener)),
            Role::Follower(seeds) => {
                connector.spawn(links.dial(seeds, heartbeat.min(DIAL_INTERVAL_MAX)))
            }
        };
        let probes = Probes::default();
        let worker_probes = probes.clone();
        let kernel_events_in = opened.events.clone();
        let worker = tokio::task::spawn_blocking(move || {
            worker::run_worker(
                opened.kernel,
                membership,
                commands_out,
                reports_in,
                opened.events,
                worker_probes,
            );
        });
        let node = Self {
            machine,
            checkpoint: config.checkpoint,
            state_file: config.state_file,
            is_unsaved: false,
            probes,
            rdma_timeout: config.timing.rdma_timeout(),
            kernel_events: kernel_events_in,
            links: HashMap::new(),
            commands,
            connector,
        };
        let sources = InputSources {
            events,
            reports,
            kernel_events,
            tick: heartbeat / 2,
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
                Some(report) = sources.reports.recv() => match report {
                    KernelReport::Failed(error) => {
                        self.step(Input::Leave)?;
                        return Err(error);
                    }
                    KernelReport::Applied { epoch, first } => {
                        first.into_iter().for_each(|(node, members)| on_ready(node, members));
                        Input::Applied(epoch)
                    }
                },
                Some(event) = sources.events.recv() => self.link_event_to_input(event)?,
                Some(event) = sources.kernel_events.recv() => match event {
                    KernelEvent::Suspect(node) => Input::Suspect(node),
                    KernelEvent::Alive(node, incarnation) => Input::Alive(node, incarnation),
                    KernelEvent::RnicRemoved(error) => {
                        self.step(Input::Leave)?;
                        return Err(error.context("RNIC removed"));
                    }
                },
                _ = clock.tick() => Input::Tick,
            };
            self.step(input)?;
        }
    }

    fn link_event_to_input(&mut self, event: LinkEvent) -> Result<Input> {
        Ok(match event {
            LinkEvent::Opened(link, host, sender) => {
                self.links.insert(link, sender);
                Input::Opened(link, host)
            }
            LinkEvent::Message(link, message) => Input::Message(link, message),
            LinkEvent::Closed(link) => {
                self.links.remove(&link);
                Input::Closed(link)
            }
            LinkEvent::Failed(error) => return Err(error).context("cannot join the cluster"),
        })
    }

    fn shut_down(&mut self, shutdown: Shutdown) -> Result<()> {
        match shutdown {
            Shutdown::Detach if self.checkpoint.is_some() => {
                self.send_command(KernelCommand::Detach)
            }
            _ => self.step(Input::Leave),
        }
    }

    fn step(&mut self, input: Input) -> Result<()> {
        let mut actions = Vec::new();
        self.machine.step(Instant::now(), input, &mut actions);
        if needs_snapshot(&actions) {
            self.save_snapshot();
        }
        actions
            .into_iter()
            .try_for_each(|action| self.perform(action))
    }

    /// Saves the state for the next process, before any action that relies on it. Without storage, for example on a full
    /// disk, the node continues: only the next process would lack the state.
    fn save_snapshot(&mut self) {
        let snapshot = self.machine.snapshot();
        let checkpoint = self.checkpoint.as_mut();
        let saved = checkpoint.map_or(Ok(()), |c| c.save(snapshot.as_ref()));
        let state_file = self.state_file.as_ref();
        let stored = match (state_file, &snapshot) {
            (Some(file), Some(Snapshot::Seed(seed))) => file.save(seed),
            _ => Ok(()),
        };
        match saved.and(stored) {
            Ok(()) => self.is_unsaved = false,
            Err(error) if !self.is_unsaved => {
                tracing::error!("{error:#}: a restart of this daemon may end the membership");
                self.is_unsaved = true;
            }
            Err(_) => {}
        }
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
            Action::Probe(node, incarnation) => {
                let events = self.kernel_events.clone();
                self.probes
                    .start((node, incarnation), self.rdma_timeout, events);
                return Ok(());
            }
            Action::Fail(reason) => bail!("cluster rejects this node: {reason}"),
            Action::Join(identity) => KernelCommand::Join(identity),
            Action::Leave => KernelCommand::Leave,
            Action::PublishHosts(hosts) => KernelCommand::PublishHosts(hosts),
            Action::ApplyView(view) => {
                log_view(&view);
                KernelCommand::ApplyView(view)
            }
        };
        self.send_command(command)
    }

    fn send_command(&self, command: KernelCommand) -> Result<()> {
        self.commands
            .send(command)
            .ok()
            .context("kernel thread has exited")
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

fn log_view(view: &View) {
    let (reachable, unreachable): (Vec<&Member>, Vec<&Member>) = view
        .members
        .iter()
        .partition(|member| member.is_reachable());
    let numbers = |members: Vec<&Member>| -> Vec<u32> { members.iter().map(|m| m.node).collect() };
    let (members, unreachable) = (numbers(reachable), numbers(unreachable));
    tracing::info!(epoch = view.epoch, ?members, ?unreachable, "new view");
}
