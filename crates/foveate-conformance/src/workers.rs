//! Worker processes, and what becomes of a case that takes one down.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use foveate_conformance::{Case, Outcome, Report, Row};

use crate::PROGRESS;
use crate::options::Options;

/// Whether a row says that no further work can be done in its process.
pub fn breaks_context(row: &Row) -> bool {
    let Outcome::Failed(lines) = &row.outcome else { return false };
    lines.iter().any(|l| l.contains("the driver says") || l.contains("did not finish within"))
}

/// Runs every case on the backends called `names`, in workers.
pub fn run(options: &Options, cases: &[Case], names: &[&str]) -> Result<Report, String> {
    let next = AtomicUsize::new(0);
    let rows: Mutex<BTreeMap<usize, Vec<Row>>> = Mutex::default();
    let trouble: Mutex<Option<String>> = Mutex::default();
    let (began, told) = (Instant::now(), Mutex::new(Instant::now()));
    thread::scope(|scope| {
        for _ in 0..options.workers.min(cases.len()) {
            scope.spawn(|| {
                let mut worker = None;
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(i) else { break };
                    match ask(options, &mut worker, i, case, names) {
                        Ok(of_case) => {
                            let mut rows = rows.lock().expect("no worker panics");
                            rows.insert(i, of_case);
                            let mut told = told.lock().expect("no worker panics");
                            if told.elapsed() >= PROGRESS {
                                *told = Instant::now();
                                let rows = rows.values().map(Vec::as_slice);
                                tell!("{}", progress(rows, cases.len(), began.elapsed()));
                            }
                        }
                        Err(e) => {
                            trouble.lock().expect("no worker panics").get_or_insert(e);
                            break;
                        }
                    }
                }
            });
        }
    });
    if let Some(trouble) = trouble.into_inner().expect("no worker panics") {
        return Err(trouble);
    }
    let rows = rows.into_inner().expect("no worker panics");
    Ok(Report { rows: rows.into_values().flatten().collect() })
}

/// How far a run is after `spent`, of whose `all` cases these are done.
fn progress<'a>(
    done: impl ExactSizeIterator<Item = &'a [Row]>,
    all: usize,
    spent: Duration,
) -> String {
    let cases = done.len();
    let mut counts = [0; 3];
    done.flatten().for_each(|row| counts[row.outcome.column()] += 1);
    let [passed, failed, declined] = counts;
    let rate = cases as f64 / spent.as_secs_f64();
    let left = (all - cases) as f64 / rate;
    format!(
        "{cases} of {all} cases, {rate:.1} a second, {left:.0} s left: \
         {passed} passed, {failed} failed, {declined} declined"
    )
}

/// One case on every backend, with as many workers as it takes down.
fn ask(
    options: &Options,
    worker: &mut Option<Worker>,
    index: usize,
    case: &Case,
    names: &[&str],
) -> Result<Vec<Row>, String> {
    let mut rows: Vec<Row> = Vec::new();
    let note = |row: &Row| {
        if let Outcome::Failed(lines) = &row.outcome {
            tell!("{} failed `{}`: {}", row.backend, row.case, lines.join("; "));
        }
    };
    while rows.len() < names.len() {
        let current = match worker {
            Some(worker) => worker,
            None => worker.insert(Worker::start(options)?),
        };
        let mut end = current.say(index, rows.len());
        while end.is_none() && rows.len() < names.len() {
            match current.rows.recv_timeout(options.timeout) {
                Ok(Err(said)) => end = Some(format!("the process said {said:?}, which is no row")),
                Ok(Ok(row)) => {
                    let broken = breaks_context(&row);
                    note(&row);
                    rows.push(row);
                    if broken {
                        break;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    end = Some(format!("no answer within {} s", options.timeout.as_secs()));
                }
                Err(RecvTimeoutError::Disconnected) => end = Some(current.last_words()),
            }
        }
        if let Some(reason) = end {
            rows.push(Row {
                case: case.name.clone(),
                seed: case.seed(),
                backend: names[rows.len()].to_owned().into(),
                outcome: Outcome::Failed(vec![reason]),
            });
            rows.last().iter().for_each(|row| note(row));
            *worker = None;
        } else if rows.last().is_some_and(breaks_context) {
            *worker = None;
        }
    }
    Ok(rows)
}

/// A process that runs cases. It is killed with the value.
struct Worker {
    child: Child,
    input: ChildStdin,
    /// What it prints: rows, or a line that is none, after which nothing is read.
    rows: Receiver<Result<Row, String>>,
}

/// How long a process that prints nothing more may take to end.
const FAREWELL: Duration = Duration::from_secs(5);

impl Worker {
    fn start(options: &Options) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut command = Command::new(program);
        command
            .args(["work", "--on", &options.on, "--backend", &options.backend])
            .args(["--only", &options.only, "--cases"])
            .arg(&options.cases)
            .args(["--subset", &options.subset.to_string(), "--dtype", &options.dtype])
            .args(["--waits", &options.waits])
            // The corpus runs in many workers, which share the cores.
            .env("RAYON_NUM_THREADS", "2");
        Self::of(command)
    }

    fn of(mut command: Command) -> Result<Self, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|e| format!("cannot start a worker: {e}"))?;
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let (tell, rows) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                let row = serde_json::from_str(&line).map_err(|_| line);
                let last = row.is_err();
                if tell.send(row).is_err() || last {
                    break;
                }
            }
        });
        Ok(Self { child, input, rows })
    }

    /// Asks for a case from a backend on; why not, when the process is gone.
    fn say(&mut self, case: usize, first: usize) -> Option<String> {
        let told = writeln!(self.input, "{case} {first}").and_then(|()| self.input.flush());
        told.err().map(|_| self.last_words())
    }

    fn last_words(&mut self) -> String {
        let began = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break format!("the process ended: {status}"),
                Ok(None) if began.elapsed() < FAREWELL => thread::sleep(Duration::from_millis(5)),
                Ok(None) => break "the process prints nothing any more and does not end".into(),
                Err(e) => break format!("the process is gone: {e}"),
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Either has ended already or has to.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn worker(script: &str) -> Worker {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Worker::of(command).unwrap()
    }

    #[test]
    fn a_run_says_how_far_it_is() {
        let row = |outcome| Row { case: "a case".into(), seed: 1, backend: "cpu".into(), outcome };
        let rows = [
            vec![row(Outcome::Passed), row(Outcome::Declined("too wide".into()))],
            vec![row(Outcome::Passed), row(Outcome::Failed(vec!["out: wrong".into()]))],
            vec![row(Outcome::Passed), row(Outcome::Passed)],
        ];
        let said = progress(rows.iter().map(Vec::as_slice), 12, Duration::from_secs(2));
        let expected = "3 of 12 cases, 1.5 a second, 6 s left: 4 passed, 1 failed, 1 declined";
        assert_eq!(said, expected);
    }

    #[test]
    fn a_line_that_is_no_row_is_told_and_a_process_that_stays_is_not_waited_for() {
        let began = Instant::now();
        let talks = worker("echo skipped: no GPU; exec sleep 60");
        let said = talks.rows.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(said, Err("skipped: no GPU".to_owned()));
        let mut stays = worker("exec >&-; exec sleep 60");
        assert!(stays.rows.recv_timeout(Duration::from_secs(30)).is_err());
        assert!(stays.last_words().ends_with("does not end"));
        assert_eq!(worker("exit 3").last_words(), "the process ended: exit status: 3");
        drop((talks, stays));
        assert!(began.elapsed() < Duration::from_secs(50), "{:?}", began.elapsed());
    }
}
