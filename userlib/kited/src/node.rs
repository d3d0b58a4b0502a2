// SPDX-License-Identifier: GPL-2.0 OR MIT
//! One daemon: a membership machine between connections, the kernel and the clock.

use std::collections::HashMap;
use std::future::Future;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{self, Receiver, Sender, UnboundedReceiver, UnboundedSender};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{interval, timeout, MissedTickBehavior};

use crate::checkpoint::Checkpoint;
use crate::kernel::{Kernel, KernelEvent};
use crate::key::Key;
use crate::links::{LinkEvent, Links};
use crate::membership::{
    needs_snapshot, Action, Follower, Input, LinkId, MembershipMachine, Seed, Snapshot, Timing,
};
use crate::protocol::Message;
use crate::worker::{self, KernelCommand, KernelReport, Membership};

/// How long goodbyes may take.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(1);

/// What makes a daemon the seed or not.
#[derive(Debug)]
pub enum Role {
    /// Starts a cluster, which others join by this socket.
    Seed(TcpListener),
    /// Joins the cluster of one of these seeds, each HOST:PORT.
    Follower(Vec<String>),
}

/// What a daemon is to do.
#[derive(Debug)]
pub struct Config {
    /// Seed or not.
    pub role: Role,
    /// The key of the cluster; none trusts everybody who can connect.
    pub key: Option<Key>,
    /// The same on all nodes.
    pub timing: Timing,
    /// What outlives the process; without it the life of the node ends with the process.
    pub checkpoint: Option<Checkpoint>,
}

/// What a daemon does when its process is asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Leaves the node in the cluster, for another process to continue its life. Without a
    /// [`checkpoint`](Config::checkpoint) the node leaves.
    Detach,
    /// Leaves the cluster.
    Leave,
}

/// Runs a daemon until `shutdown`. `on_ready` gets the number of this node and that of the members when the kernel acts
/// on the first view of a life, or of this process.
///
/// # Errors
/// If the kernel refuses or the cluster does, which may be for want of a key.
pub async fn run(
    mut config: Config,
    kernel: impl Kernel,
    mut on_ready: impl FnMut(u32, usize),
    shutdown: impl Future<Output = Shutdown>,
) -> Result<()> {
    let (kernel_events_in, kernel_events) = mpsc::unbounded_channel();
    let saved = load_snapshot(&mut config);
    let open = move || open_kernel(kernel, saved, kernel_events_in);
    let opened = tokio::task::spawn_blocking(open).await??;
    let (mut node, mut sources) = DaemonNode::start(config, opened, kernel_events)?;
    let result = node.run_loop(&mut sources, &mut on_ready, shutdown).await;
    node.finish(sources).await?;
    result
}

/// Loads what a former process saved, if this one can go on with it.
fn load_snapshot(config: &mut Config) -> Option<Snapshot> {
    let loaded = config.checkpoint.as_mut()?.load();
    let loaded = loaded.unwrap_or_else(|error| {
        tracing::warn!("{error:#}: the node begins a new life");
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

/// The kernel, and what a former process left.
struct OpenedKernel<K> {
    kernel: K,
    events: UnboundedSender<KernelEvent>,
    address: kite::FabricAddress,
    prior: Option<(Snapshot, Membership)>,
}

/// Goes on with the life of a snapshot if the kernel does. Blocks.
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
            tracing::info!(node = snapshot.node(), epoch = resumed.epoch, "goes on");
            let membership = Membership::new(snapshot.node(), resumed.session, resumed.epoch);
            prior = Some((snapshot, membership));
        } else {
            tracing::warn!("checkpoint is out of date: the node begins a new life");
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

fn new_machine(
    config: &Config,
    address: kite::FabricAddress,
    snapshot: Option<Snapshot>,
) -> Result<Box<dyn MembershipMachine>> {
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).context("no random numbers")?;
    let incarnation = getrandom::u64().context("no random numbers")?.max(1);
    let timing = config.timing;
    Ok(match (&config.role, snapshot) {
        (_, Some(Snapshot::Seed(seed))) => Box::new(Seed::resume(timing, seed)),
        (_, Some(Snapshot::Follower(follower))) => {
            Box::new(Follower::resume(timing, address, follower))
        }
        (Role::Seed(_), None) => Box::new(Seed::new(timing, address, incarnation, secret)),
        (Role::Follower(_), None) => Box::new(Follower::new(timing, address, incarnation)),
    })
}

/// Where inputs come from.
struct InputSources {
    events: Receiver<LinkEvent>,
    reports: UnboundedReceiver<KernelReport>,
    kernel_events: UnboundedReceiver<KernelEvent>,
    tick: Duration,
    worker: JoinHandle<()>,
}

/// Where actions go to.
struct DaemonNode {
    machine: Box<dyn MembershipMachine>,
    checkpoint: Option<Checkpoint>,
    links: HashMap<LinkId, Sender<Message>>,
    commands: UnboundedSender<KernelCommand>,
    /// Makes connections; ends with this.
    connector: JoinSet<()>,
}

impl DaemonNode {
    fn start(
        config: Config,
        opened: OpenedKernel<impl Kernel>,
        kernel_events: UnboundedReceiver<KernelEvent>,
    ) -> Result<(Self, InputSources)> {
        let (snapshot, membership) = opened.prior.unzip();
        let machine = new_machine(&config, opened.address, snapshot)?;
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
            Role::Follower(seeds) => connector.spawn(links.dial(seeds, heartbeat)),
        };
        let worker = tokio::task::spawn_blocking(move || {
            worker::run_worker(
                opened.kernel,
                membership,
                commands_out,
                reports_in,
                opened.events,
            );
        });
        let node = Self {
            machine,
            checkpoint: config.checkpoint,
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
            // What was said comes before the clock: after a pause, what peers said in time counts.
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
                Some(news) = sources.kernel_events.recv() => match news {
                    KernelEvent::Suspect(node) => Input::Suspect(node),
                    KernelEvent::RnicRemoved(error) => {
                        self.step(Input::Leave)?;
                        return Err(error.context("the RNIC is gone"));
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

    /// Saves what the next process needs, before anything is done that relies on it.
    fn save_snapshot(&mut self) {
        let snapshot = self.machine.snapshot();
        let saved = self.checkpoint.as_mut().map(|c| c.save(snapshot.as_ref()));
        if let Some(Err(error)) = saved {
            tracing::error!("{error:#}: the life of the node would not outlive this process");
        }
    }

    fn perform(&mut self, action: Action) -> Result<()> {
        let command = match action {
            Action::Send(link, message) => {
                let full = |sender: &Sender<Message>| sender.try_send(message).is_err();
                if self.links.get(&link).is_some_and(full) {
                    // It does not take what it is sent. It may come back when it can.
                    self.links.remove(&link);
                }
                return Ok(());
            }
            Action::Close(link) => {
                self.links.remove(&link);
                return Ok(());
            }
            Action::Fail(reason) => bail!("the cluster refuses this node: {reason}"),
            Action::Join(identity) => KernelCommand::Join(identity),
            Action::Leave => KernelCommand::Leave,
            Action::PublishHosts(hosts) => KernelCommand::PublishHosts(hosts),
            Action::ApplyView(view) => {
                let members: Vec<u32> = view.members.iter().map(|m| m.node).collect();
                tracing::info!(epoch = view.epoch, ?members, "view");
                KernelCommand::ApplyView(view)
            }
        };
        self.send_command(command)
    }

    fn send_command(&self, command: KernelCommand) -> Result<()> {
        self.commands
            .send(command)
            .ok()
            .context("the thread of the kernel has ended")
    }

    /// Lets goodbyes go out, and leaves the cluster.
    async fn finish(self, mut sources: InputSources) -> Result<()> {
        let Self {
            links,
            commands,
            connector,
            ..
        } = self;
        drop((connector, links, commands));
        // Each connection holds a sender of events until it has ended.
        let all_closed = async { while sources.events.recv().await.is_some() {} };
        let _ = timeout(GOODBYE_TIMEOUT, all_closed).await;
        sources
            .worker
            .await
            .context("the thread of the kernel failed")
    }
}
