// SPDX-License-Identifier: GPL-2.0 OR MIT
//! A command that runs on a node: output, exit status, signals.
//!
//! sshd starts each command in a session of its own. The command first writes the number of that session to a file
//! under /run/kite. A signal can then be sent to the whole session.

use std::io::Read;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Context, Error, Result};
use crate::machine::guarded::Guarded;
use crate::machine::kernel::patience;
use crate::node::ssh::{quote, Ssh};

/// Timeout of a trivial command.
const ROUND_TRIP: Duration = Duration::from_secs(10);

/// Exit status and output of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Exit status; 128 + n if signal n ended the command.
    pub status: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Output {
    /// Returns `true` if the exit status is 0.
    pub fn success(&self) -> bool {
        self.status == 0
    }
}

/// Waits for processes, each of which must succeed within `limit`. Returns their standard output.
///
/// # Errors
///
/// - [`Error::Timeout`]: a process runs longer than `limit`.
/// - [`Error::Failed`]: a process fails.
pub fn outputs(processes: &mut [Process], limit: Duration) -> Result<Vec<String>> {
    let output = |process: &mut Process| {
        let output = process.wait(limit)?;
        if !output.success() {
            return Err(process.failed(output));
        }
        Ok(output.stdout.trim().to_string())
    };
    processes.iter_mut().map(output).collect()
}

/// A running command, which is killed on drop.
#[derive(Debug)]
pub struct Process {
    ssh: Arc<Ssh>,
    command: String,
    client: Guarded,
    streams: Arc<Streams>,
    session: Option<String>,
    /// Number of the node's ssh connection at the start of the command.
    connection: u64,
    read: usize,
}

#[derive(Debug, Default)]
struct Streams {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    closed: usize,
}

impl Process {
    /// Starts `line` in a shell on the node, as `user`.
    pub(crate) fn start(ssh: &Arc<Ssh>, line: &str, user: &str) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let session = format!("/run/kite/{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let mut client = ssh.program("ssh");
        client.args([ssh.node(), &remote(line, user, &session)]);
        Self::adopt(ssh, client, line, Some(session))
    }

    /// Starts `client`, an ssh or scp that was prepared for the node, and collects its output.
    pub(crate) fn adopt(
        ssh: &Arc<Ssh>,
        mut client: Command,
        command: &str,
        session: Option<String>,
    ) -> Result<Self> {
        client
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let connection = ssh.connection();
        let mut client = Guarded::spawn(client).context(|| "starting ssh".into())?;
        let streams = Arc::<Streams>::default();
        let child = client.child();
        follow(&streams, child.stdout.take(), |state| &mut state.stdout);
        follow(&streams, child.stderr.take(), |state| &mut state.stderr);
        Ok(Process {
            ssh: ssh.clone(),
            command: command.into(),
            client,
            streams,
            session,
            connection,
            read: 0,
        })
    }

    /// Returns the next line of standard output, or `None` at its end.
    pub fn read_line(&mut self, limit: Duration) -> Result<Option<String>> {
        self.next_line(patience(limit))
    }

    fn next_line(&mut self, limit: Duration) -> Result<Option<String>> {
        let from = self.read;
        let state = self.until(limit, |state| {
            state.stdout[from..].contains(&b'\n') || state.closed == 2
        })?;
        let rest = &state.stdout[from..];
        let taken = rest
            .iter()
            .position(|&byte| byte == b'\n')
            .map_or(rest.len(), |at| at + 1);
        let line = String::from_utf8_lossy(&rest[..taken])
            .trim_end_matches('\n')
            .to_string();
        drop(state);
        self.read += taken;
        Ok((taken > 0).then_some(line))
    }

    /// Reads lines until one contains `text`. Returns that line. Fails if the command ends before.
    pub fn read_until(&mut self, text: &str, limit: Duration) -> Result<String> {
        let deadline = Instant::now() + patience(limit);
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.next_line(left)? {
                Some(line) if line.contains(text) => return Ok(line),
                Some(_) => (),
                None => {
                    let output = self.output()?;
                    return Err(self.failed(output));
                }
            }
        }
    }

    /// Waits for the end of the command for at most `limit`. At the timeout the command continues.
    pub fn wait(&mut self, limit: Duration) -> Result<Output> {
        drop(self.until(patience(limit), |state| state.closed == 2)?);
        self.output()
    }

    /// Sends a signal, such as `TERM`, to all processes in the session of the command.
    pub fn signal(&self, name: &str) -> Result<()> {
        let Some(session) = &self.session else {
            return Ok(());
        };
        // A new command may not have written its session yet.
        let line = format!(
            "for try in 1 2 3 4 5 6 7 8 9; do [ -s {session} ] && break; sleep 0.1; done; \
             read -r leader <{session} && kill -s {name} -- -$leader || ! kill -s 0 -- -$leader"
        );
        let mut client = self.ssh.program("ssh");
        client.args([self.ssh.node(), &line]);
        let mut process = Self::adopt(&self.ssh, client, &line, None)?;
        let output = process.wait(ROUND_TRIP)?;
        if output.success() {
            return Ok(());
        }
        Err(process.failed(output))
    }

    /// Kills all processes in the session of the command.
    pub fn kill(&mut self) -> Result<()> {
        let sent = self.signal("KILL");
        self.client.kill();
        sent
    }

    /// Returns `true` while the ssh client of the command runs.
    pub fn is_running(&mut self) -> bool {
        self.client.status().is_none()
    }

    pub(crate) fn failed(&self, output: Output) -> Error {
        Error::Failed {
            node: self.ssh.node().into(),
            command: self.command.clone(),
            status: output.status,
            output: output.stdout + &output.stderr,
        }
    }

    /// Returns the output of the command. ssh fails with status 255, which a command may have too. It is the status of
    /// the command if the node still responds on the same connection.
    fn output(&mut self) -> Result<Output> {
        let output = self.collect()?;
        if output.status != 255 || self.still_answers() {
            return Ok(output);
        }
        Err(self.ssh.unreachable())
    }

    /// Waits for ssh. Both streams have ended, so ssh is about to end.
    fn collect(&mut self) -> Result<Output> {
        let ended = self
            .client
            .child()
            .wait()
            .context(|| "waiting for ssh".into())?;
        let state = self.streams.state();
        Ok(Output {
            status: ended.code().unwrap_or(128 + 9),
            stdout: String::from_utf8_lossy(&state.stdout).into(),
            stderr: String::from_utf8_lossy(&state.stderr).into(),
        })
    }

    fn still_answers(&self) -> bool {
        let mut client = self.ssh.program("ssh");
        client.args([self.ssh.node(), "true"]);
        let probe = Self::adopt(&self.ssh, client, "true", None);
        let answer = probe.and_then(|mut probe| {
            drop(probe.until(patience(ROUND_TRIP), |state| state.closed == 2)?);
            probe.collect()
        });
        answer.is_ok_and(|output| output.success()) && self.ssh.connection() == self.connection
    }

    fn until(
        &self,
        limit: Duration,
        done: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'_, State>> {
        let waiting = |state: &mut State| !done(state);
        let result = self
            .streams
            .changed
            .wait_timeout_while(self.streams.state(), limit, waiting);
        let (state, timeout) = result.unwrap_or_else(PoisonError::into_inner);
        if !timeout.timed_out() {
            return Ok(state);
        }
        let output = [&state.stdout[..], &state.stderr[..]].concat();
        Err(Error::Timeout {
            node: self.ssh.node().into(),
            command: self.command.clone(),
            limit,
            output: String::from_utf8_lossy(&output).into(),
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.session.is_some() && self.is_running() && self.ssh.connected() {
            // Ignore a failure: the command ends with its node.
            let _ = self.kill();
        }
    }
}

impl Streams {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the command line for sshd. The outer shell converts a signal to a status. So it must survive signals to the
/// session, and traps them. Traps are not inherited.
fn remote(line: &str, user: &str, session: &str) -> String {
    let run = format!("sh -c {}", quote(line));
    let run = match user {
        "root" => run,
        _ => format!(
            "cd ~{user} && setpriv --reuid={user} --regid={user} --init-groups --reset-env {run}"
        ),
    };
    format!("trap : HUP INT QUIT TERM USR1 USR2; echo $$ >{session}; {run}; exit $?")
}

/// Collects a stream on a thread, so that neither stream blocks the command.
fn follow(
    streams: &Arc<Streams>,
    source: Option<impl Read + Send + 'static>,
    sink: fn(&mut State) -> &mut Vec<u8>,
) {
    let streams = streams.clone();
    thread::spawn(move || {
        let mut chunk = [0; 8192];
        if let Some(mut source) = source {
            while let Ok(count @ 1..) = source.read(&mut chunk) {
                sink(&mut streams.state()).extend_from_slice(&chunk[..count]);
                streams.changed.notify_all();
            }
        }
        streams.state().closed += 1;
        streams.changed.notify_all();
    });
}
